"""Metrics are exact, whole lines, and the same file whether or not the run was killed."""

import io
import json
import math
import struct
import sys
import time
import types

import jax.numpy as jnp
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from marl_jax.config.run_config import ConfigError
from marl_jax.config.run_fields import TRACKERS
from marl_jax.run_folder import boards
from marl_jax.run_folder.boards import TensorBoard, Tracker, numbers
from marl_jax.run_folder.checkpoints import Checkpoints
from marl_jax.run_folder.files import DiskFull, append
from marl_jax.run_folder.folder import FolderError
from marl_jax.run_folder.json_lines import append_line, last_complete_step, read_lines, rewind


def write_steps(path, first, last, resumed_at=None):
    if resumed_at is not None:
        rewind(path, resumed_at)
    for step in range(first, last + 1):
        append_line(path, step, {"loss": math.sin(step), "role": {"generator": {"reward": step / 3}}})
    return path.read_bytes()


def test_a_file_may_be_named_by_a_text(tmp_path):
    path = str(tmp_path / "metrics.jsonl")
    append_line(path, 1, {"loss": 0.5})
    assert (list(read_lines(path)), last_complete_step(path)) == ([{"step": 1, "loss": 0.5}], 1)


def test_a_line_is_one_object_with_its_step_and_exact_numbers(tmp_path):
    values = {
        "a": 0.1 + 0.2,
        "b": 1e-300,
        "c": np.float32(0.1),
        "d": jnp.float32(0.1),
        "n": np.int64(2**53 + 1),
    }
    values |= {"list": np.arange(2), "text": "a\nb", "none": None, "yes": True}
    append_line(tmp_path / "metrics.jsonl", 3, values)
    line = (tmp_path / "metrics.jsonl").read_text()
    assert line.count("\n") == 1 and line.startswith('{"step": 3, ')
    found = json.loads(line)
    assert found["a"] == 0.1 + 0.2 and found["b"] == 1e-300 and found["n"] == 2**53 + 1
    assert np.float32(found["c"]) == found["c"] == found["d"] == float(np.float32(0.1))
    assert found["list"] == [0, 1] and found["text"] == "a\nb" and found["none"] is None
    assert found["yes"] is True


def test_what_is_not_finite_is_null_and_the_line_stays_json(tmp_path):
    values = {"a": float("nan"), "b": [np.inf, jnp.float32(-jnp.inf)], "c": {"d": np.float64("nan")}}
    append_line(tmp_path / "metrics.jsonl", 1, values)

    def refuse(name):
        raise AssertionError(name)

    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=refuse) == {
        "step": 1,
        "a": None,
        "b": [None, None],
        "c": {"d": None},
    }


@pytest.mark.parametrize("cut", [0, 1, 30, 10_000])
@pytest.mark.parametrize("restored", [0, 4, 7])
def test_a_killed_and_resumed_file_equals_that_of_a_run_never_killed(tmp_path, restored, cut):
    never = write_steps(tmp_path / "never.jsonl", 1, 9)
    killed = write_steps(tmp_path / "killed.jsonl", 1, 7)
    (tmp_path / "killed.jsonl").write_bytes(killed + never[len(killed) :][:cut][:-1])
    assert write_steps(tmp_path / "killed.jsonl", restored + 1, 9, resumed_at=restored) == never


def test_a_partial_line_longer_than_a_block_is_taken_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = write_steps(path, 1, 2)
    path.write_bytes(whole + b'{"step": 3, "x": "' + b"y" * 200_000)
    assert rewind(path, 2) == [] and path.read_bytes() == whole
    path.write_bytes(b'{"step": 1')
    assert rewind(path, 2) == [] and path.read_bytes() == b""
    path.write_bytes(b'{"step": 1')
    assert write_steps(path, 1, 2) == whole


def test_several_lines_of_one_step_stay_and_go_together(tmp_path):
    path = tmp_path / "eval.jsonl"
    for step in (10, 10, 20, 20):
        append_line(path, step, {"split": "val"})
    assert rewind(path, 10) == [{"step": 20, "split": "val"}] * 2 and rewind(path, 10) == []
    append_line(path, 20, {"split": "again"})
    assert [(e["step"], e["split"]) for e in read_lines(path)] == [
        (10, "val"),
        (10, "val"),
        (20, "again"),
    ]


def test_lines_of_a_checkpoint_that_is_always_there_stay(tmp_path):
    path = tmp_path / "eval.jsonl"
    base, own, later = {"step": 0, "checkpoint": "base"}, {"step": 0}, {"step": 4, "checkpoint": "4"}
    for line in (base, own, later):
        append_line(path, line["step"], line)
    assert rewind(path, -1, "base") == [own, later]
    assert list(read_lines(path)) == [base]


def test_a_line_that_is_no_metrics_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nhello\n')
    told = (
        r"holds a line that is no JSON object with a step: line \d, 'hello.*; restore the line, or remove it"
    )
    for use in (lambda path: rewind(path, 5), lambda path: list(read_lines(path)), last_complete_step):
        with pytest.raises(FolderError, match=told):
            use(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize(
    "lines, last", [([], 0), ([1, 2, 3], 3), ([1, 2, 4], 2), ([2, 3], 0), ([1, 2, 2, 3], 2)]
)
def test_what_is_recorded_ends_where_the_first_gap_is(tmp_path, lines, last):
    assert last_complete_step(tmp_path / "none.jsonl") == 0
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in lines))
    assert last_complete_step(tmp_path / "metrics.jsonl") == last


def open_lines(path):
    rewind(path, 0)


@pytest.mark.parametrize("opened", [open_lines, TensorBoard, Checkpoints, last_complete_step])
def test_what_is_in_the_way_of_a_file_or_directory_is_one_line(tmp_path, opened):
    place = tmp_path / "it"
    place.mkdir() if opened in (open_lines, last_complete_step) else place.touch()
    with pytest.raises(FolderError, match=r"/it' cannot be used \(.*\): move it away"):
        opened(place)


def test_a_full_disk_is_told(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(DiskFull, match="is full"):
        append_line(tmp_path / "metrics.jsonl", 1, {"a": 1})


class Filling(io.FileIO):
    """Takes five bytes at a time, and so many at all."""

    room = 1000

    def write(self, data):
        if not self.room:
            raise OSError(28, "No space left on device")
        taken = super().write(data[: min(5, self.room)])
        self.room -= taken
        return taken


def test_what_a_file_takes_in_pieces_is_whole_or_not_there(tmp_path):
    with Filling(tmp_path / "file", "ab") as file:
        append(file, b"a whole record\n")
        file.room = 7
        with pytest.raises(OSError, match="No space"):
            append(file, b"another record\n")
    assert (tmp_path / "file").read_bytes() == b"a whole record\n"


def test_a_disk_that_fills_up_within_an_event_leaves_whole_events(tmp_path):
    board = TensorBoard(tmp_path)
    board.write(1, {"accuracy": 0.25})
    (path,) = tmp_path.iterdir()
    board._file = Filling(path, "ab")
    board.write(2, {"accuracy": 0.5})
    board._file.room = 7
    with pytest.raises(DiskFull):
        board.write(3, {"accuracy": 0.75})
    board.close()
    assert [event.step for event in decode(path)] == [0, 1, 2]


def test_numbers_are_flat_and_finite():
    values = {"a": 1, "b": {"c": 0.5, "d": None}, "e": float("nan"), "f": "text", "g": True}
    assert numbers(values) == {"a": 1.0, "b/c": 0.5, "g": 1.0}


# ---------------------------------------------------------------- event files, read by protobuf's own decoder


def event_class():
    """TensorBoard's Event, as far as it is needed here, from its published field numbers."""
    file = descriptor_pb2.FileDescriptorProto(name="event_test.proto", package="t", syntax="proto3")
    types = {"double": 1, "float": 2, "int64": 3, "string": 9, "message": 11, "int32": 5}
    layout = {
        "Value": [("tag", 1, "string"), ("simple_value", 2, "float")],
        "Summary": [("value", 1, ".t.Value")],
        "SessionLog": [("status", 1, "int32")],
        "Event": [
            ("wall_time", 1, "double"),
            ("step", 2, "int64"),
            ("file_version", 3, "string"),
            ("summary", 5, ".t.Summary"),
            ("session_log", 7, ".t.SessionLog"),
        ],
    }
    for name, entries in layout.items():
        message = file.message_type.add(name=name)
        for field, number, kind in entries:
            entry = message.field.add(name=field, number=number, label=3 if field == "value" else 1)
            entry.type = types.get(kind, types["message"])
            if kind.startswith("."):
                entry.type_name = kind
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Event"))


def crc(data):
    """CRC-32C bit by bit, masked as the record format says."""
    value = 0xFFFFFFFF
    for bit in (byte >> i & 1 for byte in data for i in range(8)):
        value = value >> 1 ^ (0x82F63B78 if (value ^ bit) & 1 else 0)
    value ^= 0xFFFFFFFF
    return ((value >> 15 | value << 17 & 0xFFFFFFFF) + 0xA282EAD8) % 2**32


def decode(path):
    data, found, kind = path.read_bytes(), [], event_class()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12])[0] == crc(data[:8])
        assert struct.unpack("<I", data[12 + length : 16 + length])[0] == crc(data[12 : 12 + length])
        found.append(kind.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return found


@pytest.mark.parametrize(
    "data, expected",  # RFC 3720, appendix B.4, and the customary check value
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"123456789", 0xE3069283),
    ],
)
def test_crc32c_gives_the_published_values(data, expected):
    assert boards.crc32c(data) == expected


def test_an_event_file_is_read_back_by_another_decoder(tmp_path):
    board = TensorBoard(tmp_path)
    board.write(300, {"accuracy": 0.25, "role": {"ü": 1e300}, "missing": float("nan"), "time/step": 2})
    board.close()
    first, second = decode(next(tmp_path.iterdir()))
    assert first.file_version == "brain.Event:2" and first.wall_time > 1.7e9
    assert second.step == 300
    values = {value.tag: value.simple_value for value in second.summary.value}
    assert values == {"accuracy": 0.25, "role/ü": float(np.finfo(np.float32).max), "time/step": 2.0}


@pytest.mark.parametrize("later", [0, -3600])
def test_a_resumed_run_begins_another_file_and_forgets_the_steps_after(tmp_path, monkeypatch, later):
    TensorBoard(tmp_path).close()
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + later * 10**9)  # the clock may have been set back
    TensorBoard(tmp_path, resumed_at=20).close()
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 2 and all("tfevents" in path.name for path in paths)
    assert len(decode(paths[0])) == 1
    again = decode(paths[1])[1]
    assert (again.step, again.session_log.status) == (21, 1)


@pytest.mark.parametrize("package", TRACKERS)
def test_a_tracker_is_asked_for_only_when_it_is_there(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        Tracker(package, tmp_path, "p", {})


@pytest.mark.parametrize("package", TRACKERS)
def test_a_tracker_gets_numbers_by_step_and_the_same_run_again_on_resume(tmp_path, monkeypatch, package):
    begun, heard = [], []
    run = types.SimpleNamespace(
        log=lambda values, step: heard.append((step, values)), finish=lambda: heard.append("finish")
    )
    fake = types.ModuleType(package)
    fake.init = lambda **given: begun.append(given) or run
    monkeypatch.setitem(sys.modules, package, fake)
    for step in (1, 2):  # a run, and its resume
        board = Tracker(package, tmp_path / "run", "p", {"seed": 3})
        board.write(
            step, {"reward": 0.5, "role": {"generator": jnp.float32(0.25)}, "warnings": ["a"], "kl": None}
        )
        board.close()
    numbers = {"reward": 0.5, "role/generator": 0.25}
    assert heard == [(1, numbers), "finish", (2, numbers), "finish"]
    assert begun[0] == begun[1]
    about = {
        "project": "p",
        "resume": "allow",
        "config": {"seed": 3},
    }
    assert about.items() <= begun[0].items()
    assert begun[0]["name"].startswith(f"{tmp_path.name}/run")
    Tracker(package, tmp_path / "other" / "run", "p", {}).close()  # as seed-0 of another cell
    assert begun[2]["name"] != begun[0]["name"]
    if package == "wandb":
        assert begun[0]["dir"] == str(tmp_path / "run") and begun[2]["id"] != begun[0]["id"]
        assert begun[0]["reinit"] == "create_new"  # another seed's run may be open in this process


@pytest.mark.parametrize("package", TRACKERS)
def test_a_tracker_that_does_not_begin_is_told_in_one_line(tmp_path, monkeypatch, package):
    fake = types.ModuleType(package)

    def init(**given):
        raise RuntimeError("No API key configured.\nSee the docs.")

    fake.init = init
    monkeypatch.setitem(sys.modules, package, fake)
    with pytest.raises(ConfigError) as error:
        Tracker(package, tmp_path / "run", "p", {})
    assert str(error.value).count("\n") <= 1 and "No API key configured." in str(error.value)
