"""TensorBoard event files, written without TensorFlow: scalars only.

    record = length: u64 | masked crc32c(length): u32 | event | masked crc32c(event): u32        little-endian
    event  = 1: wall_time f64, 2: step i64, 3: file_version | 5: summary {1: {1: tag, 2: value f32}*}
           | 7: session_log {1: status}                                                           protobuf

A session log with status START tells TensorBoard to forget what earlier files say from its step on.
"""

import functools
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from marl_jax.runs.files import append

_START = 1
_LARGEST = 3.4028234663852886e38  # of float32


class EventFile:
    """One event file; every call is in it when it returns."""

    def __init__(self, directory: Path, purge_step: int | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 1000:016d}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(directory / name, "ab", buffering=0)  # noqa: SIM115
        self._write(_text(3, b"brain.Event:2"))
        if purge_step is not None:
            self._write(_varint(2, purge_step) + _text(7, _varint(1, _START)))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One event with a value per tag."""
        each = (_text(1, tag.encode()) + _key(2, 5) + _float(value) for tag, value in values.items())
        self._write(_varint(2, step) + _text(5, b"".join(_text(1, value) for value in each)))

    def close(self) -> None:
        self._file.close()

    def _write(self, fields: bytes) -> None:
        append(self._file, record(_key(1, 1) + struct.pack("<d", time.time()) + fields))


def record(data: bytes) -> bytes:
    """The data as one record of the file."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data))


def masked_crc(data: bytes) -> int:
    """CRC-32C, rotated right by 15 bits and moved by a constant, so that a CRC of data with CRCs is no trap."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """CRC-32 with the Castagnoli polynomial."""
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


@functools.cache
def _table() -> tuple[int, ...]:
    def entry(value: int) -> int:
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        return value

    return tuple(map(entry, range(256)))


def _key(field: int, kind: int) -> bytes:
    return _number(field << 3 | kind)


def _varint(field: int, value: int) -> bytes:
    return _key(field, 0) + _number(value)


def _text(field: int, value: bytes) -> bytes:
    return _key(field, 2) + _number(len(value)) + value


def _float(value: float) -> bytes:
    return struct.pack("<f", max(-_LARGEST, min(value, _LARGEST)))


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
