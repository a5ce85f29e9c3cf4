"""Other places that show the numbers of `metrics.jsonl`; they are never read back.

TensorBoard's event files are written here, without TensorFlow: scalars only.

    record = length: u64 | masked crc32c(length): u32 | event | masked crc32c(event): u32        little-endian
    event  = 1: wall_time f64, 2: step i64, 3: file_version | 5: summary {1: {1: tag, 2: value f32}*}
           | 7: session_log {1: status}                                                           protobuf
"""

import hashlib
import importlib
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marl_jax.config.run_config import ConfigError
from marl_jax.config.run_fields import not_installed
from marl_jax.run_folder.files import append, disk_errors
from marl_jax.run_folder.folder import path_errors
from marl_jax.run_folder.json_lines import plain

_START = 1  # status of a session log: TensorBoard drops values of earlier files from its step on
_LARGEST = 3.4028234663852886e38  # of float32


class TensorBoard:
    """An event file, complete when `write` returns. A resumed run begins a new one, whose steps replace older ones."""

    def __init__(self, directory: Path, resumed_at: int = 0) -> None:
        self._directory = directory
        with path_errors(directory), disk_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads files in the order of their names, even if the clock was set back.
            earlier = (path.name.split(".")[3] for path in directory.glob("events.out.tfevents.*"))
            number = max([time.time_ns() // 1000, *(int(one) + 1 for one in earlier if one.isdecimal())])
            name = f"events.out.tfevents.{number:016d}.{socket.gethostname()}.{os.getpid()}"
            self._file = open(directory / name, "ab", buffering=0)  # noqa: SIM115
            self._write(_text(3, b"brain.Event:2"))
            if resumed_at:
                self._write(_varint(2, resumed_at + 1) + _text(7, _varint(1, _START)))

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """One event with a value per tag."""
        clipped = ((tag, max(-_LARGEST, min(value, _LARGEST))) for tag, value in numbers(values).items())
        tags = (_text(1, tag.encode()) + _key(2, 5) + struct.pack("<f", value) for tag, value in clipped)
        with disk_errors(self._directory):
            self._write(_varint(2, step) + _text(5, b"".join(_text(1, tag) for tag in tags)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, fields: bytes) -> None:
        append(self._file, record(_key(1, 1) + struct.pack("<d", time.time()) + fields))


class Tracker:
    """One run on a tracker for one run folder: Weights & Biases, or Trackio, whose package has the same interface."""

    def __init__(self, package: str, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        try:
            tracker = importlib.import_module(package)
        except ImportError:
            raise ConfigError([not_installed(package)]) from None
        digest = hashlib.sha256(str(folder).encode()).hexdigest()
        settings: dict[str, Any] = {"project": project, "resume": "allow", "config": dict(config)}
        settings["name"] = f"{folder.parent.name}/{folder.name}"
        if package == "wandb":  # without `reinit`, seeds in one process would share the first one's run
            settings |= {"id": digest[:16], "dir": str(folder), "reinit": "create_new"}
        else:  # Trackio identifies runs by name, and many folders have a seed-0
            settings["name"] += f"-{digest[:6]}"
        try:
            self._run = tracker.init(**settings)  # on resume the same run again
        except Exception as error:  # of the package's own types: no log-in, no network
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            problem = f"logging.{package} is true, but {package} cannot start: {reason}"
            raise ConfigError([f"{problem}; log in, choose offline mode, or set it to false"]) from None

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Send the numbers of a step."""
        self._run.log(numbers(values), step=step)

    def close(self) -> None:
        """End the tracker's run."""
        self._run.finish()


Board = TensorBoard | Tracker


def numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """All numbers, also of nested objects, by slash-separated name; values that are not finite are left out."""
    flat: dict[str, float] = {}
    for name, value in plain(values).items():
        if isinstance(value, Mapping):
            flat |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            flat[prefix + name] = float(value)
    return flat


# ---------------------------------------------------------------- event files


def record(data: bytes) -> bytes:
    """The data as one record of the file."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data))


def masked_crc(data: bytes) -> int:
    """CRC-32C, rotated right by 15 bits, plus a constant: a CRC over data that contains CRCs would be weak."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """CRC-32 with the Castagnoli polynomial."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _REMAINDERS[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _remainder(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_REMAINDERS = [*map(_remainder, range(256))]


def _key(field: int, kind: int) -> bytes:
    return _number(field << 3 | kind)


def _varint(field: int, value: int) -> bytes:
    return _key(field, 0) + _number(value)


def _text(field: int, value: bytes) -> bytes:
    return _key(field, 2) + _number(len(value)) + value


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
