"""Episodes on disk: gzipped lines of JSON, numbers as base64 of little-endian int32 and float32, bit for bit.

A task is written once, before its first episode; a prompt that continues a history keeps only what it adds.
`zcat FILE | jq .calls[].text` reads one without this library.
"""

import base64
import dataclasses
import gzip
import json
import os
import pathlib
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from marl_jax.rollouts.episodes import CallRecord, Episode, ToolRecord
from marl_jax.tasks.task import Task

FORMAT = 1

# What reading a file that something else wrote, or broke, may come to.
DAMAGE = (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError, AssertionError)


def write_episodes(path: str | os.PathLike[str], episodes: Iterable[Episode]) -> None:
    """Write them all; the file appears only once it is complete."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:
        file.write(_line({"format": FORMAT}))
        last: Task | None = None
        for episode in episodes:
            if episode.task != last:
                last = episode.task
                file.write(_line({"task": dataclasses.asdict(last)}))
            file.write(_line(_pack_episode(episode)))
    os.replace(unfinished, path)


def read_episodes(path: str | os.PathLike[str]) -> list[Episode]:
    """Read them back, equal to what was written."""
    episodes: list[Episode] = []
    task: Task | None = None
    number = 0
    try:
        with gzip.open(path, "rt", encoding="ascii") as file:
            for number, line in enumerate(file, 1):
                entry = json.loads(line)
                if number == 1:
                    if entry != {"format": FORMAT}:
                        raise ValueError(f"it begins with {line[:40]!r}, this version reads format {FORMAT}")
                elif "task" in entry:
                    task = _task(entry["task"])
                else:
                    assert task is not None
                    episodes.append(_unpack_episode(entry, task))
    except FileNotFoundError:
        raise
    except DAMAGE as error:
        raise ValueError(f"'{path}' cannot be read as episodes, after line {number}: {error}") from error
    return episodes


def _pack_episode(episode: Episode) -> dict[str, Any]:
    packed = {field.name: getattr(episode, field.name) for field in dataclasses.fields(episode)}
    del packed["task"]
    packed["calls"] = [_pack_call(call, episode.calls) for call in episode.calls]
    packed["tools"] = [dataclasses.asdict(tool) for tool in episode.tools]
    return packed


def _unpack_episode(packed: dict[str, Any], task: Task) -> Episode:
    calls: list[CallRecord] = []
    for call in packed["calls"]:
        calls.append(_unpack_call(call, calls))
    tools = tuple(ToolRecord(**tool) for tool in packed["tools"])
    return Episode(
        **{**packed, "task": task, "calls": tuple(calls), "tools": tools, "key": tuple(packed["key"])}
    )


def _pack_call(call: CallRecord, calls: Sequence[CallRecord]) -> dict[str, Any]:
    packed = {
        field.name: getattr(call, field.name)
        for field in dataclasses.fields(call)
        if getattr(call, field.name) != field.default
    }
    before = _history(call.after, calls)
    packed["follows"] = call.prompt_tokens[: len(before)] == before and len(before) > 0
    added = call.prompt_tokens[len(before) :] if packed["follows"] else call.prompt_tokens
    return {
        **packed,
        "prompt_tokens": _numbers(added, "<i4"),
        "tokens": _numbers(call.tokens, "<i4"),
        "logprobs": _numbers(call.logprobs, "<f4"),
    }


def _unpack_call(packed: dict[str, Any], calls: Sequence[CallRecord]) -> CallRecord:
    before = _history(packed.get("after"), calls) if packed.pop("follows") else ()
    return CallRecord(
        **{
            **packed,
            "prompt_tokens": before + _tuple(packed["prompt_tokens"], "<i4"),
            "tokens": _tuple(packed["tokens"], "<i4"),
            "logprobs": _tuple(packed["logprobs"], "<f4"),
            "reads": tuple(packed.get("reads", ())),
            "kept": tuple(map(tuple, packed["kept"])) if "kept" in packed else None,
        }
    )


def _history(after: int | None, calls: Sequence[CallRecord]) -> tuple[int, ...]:
    return () if after is None else calls[after].prompt_tokens + calls[after].tokens


def _task(packed: dict[str, Any]) -> Task:
    tests = {name: tuple(packed[name]) for name in ("tests", "public_tests")}
    return Task(**{**packed, **tests})


def _numbers(values: Sequence[float], dtype: str) -> str:
    return base64.b64encode(np.asarray(values, dtype).tobytes()).decode()


def _tuple(text: str, dtype: str) -> tuple[Any, ...]:
    return tuple(np.frombuffer(base64.b64decode(text, validate=True), dtype).tolist())


def _line(entry: dict[str, Any]) -> bytes:
    return (json.dumps(entry, separators=(",", ":")) + "\n").encode("ascii")
