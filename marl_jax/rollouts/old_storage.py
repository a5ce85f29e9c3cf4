"""Episodes as earlier versions stored them: gzipped lines of JSON, and a second file with the rewards of calls.

Arrays are base64 of little-endian int32 and float32. A task is stored before its first episode; a prompt that
continues a history is stored without that history.
"""

import base64
import dataclasses
import gzip
import json
import pathlib
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from marl_jax.episodes import CallRecord, Episode, ToolRecord
from marl_jax.table import Table
from marl_jax.task import Task

FORMAT = 1
SUFFIX = ".jsonl.gz"

# Exceptions that reading a foreign or damaged file may raise.
DAMAGE = (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError, AssertionError)


def read_old(path: pathlib.Path) -> Table:
    """The table of such a file; with rewards and advantages if the file with the rewards exists."""
    episodes = _read(path)
    rewards_path = path.with_name(path.name.removesuffix(SUFFIX) + ".rewards.jsonl")
    if not rewards_path.exists():
        return Table.of(episodes)
    try:
        return _with_rewards(episodes, rewards_path.read_text(encoding="utf-8").splitlines())
    except DAMAGE as error:
        raise ValueError(f"'{rewards_path}' cannot be read as rewards: {error}") from error


def _with_rewards(episodes: Sequence[Episode], lines: Sequence[str]) -> Table:
    if len(lines) != len(episodes):
        raise ValueError(f"it has {len(lines)} lines for {len(episodes)} episodes")
    entries = [json.loads(line) for line in lines]
    table = Table.of(
        [dataclasses.replace(episode, outcome=entry["outcome"]) for episode, entry in zip(episodes, entries)]
    )

    def column(name: str) -> np.ndarray:
        for episode, entry in zip(episodes, entries):
            if len(entry[name]) != len(episode.calls):
                raise ValueError(f"it has {len(entry[name])} {name} for {len(episode.calls)} calls")
        values = [value for entry in entries for value in entry[name]]
        return np.array([np.nan if value is None else value for value in values], np.float64)

    return table.replace(grade=None, reward=column("rewards"), advantage=column("advantages"))


def _read(path: pathlib.Path) -> list[Episode]:
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
                    task = Task.from_json(entry["task"])
                else:
                    assert task is not None
                    episodes.append(_unpack_episode(entry, task))
    except FileNotFoundError:
        raise
    except DAMAGE as error:
        raise ValueError(f"'{path}' cannot be read as episodes, after line {number}: {error}") from error
    return episodes


def _unpack_episode(packed: dict[str, Any], task: Task) -> Episode:
    calls: list[CallRecord] = []
    for call in packed["calls"]:
        calls.append(_unpack_call(call, calls))
    tools = tuple(ToolRecord(**tool) for tool in packed["tools"])
    return Episode(
        **{**packed, "task": task, "calls": tuple(calls), "tools": tools, "key": tuple(packed["key"])}
    )


def _unpack_call(packed: dict[str, Any], calls: Sequence[CallRecord]) -> CallRecord:
    after = packed.get("after") if packed.pop("follows") else None
    history = () if after is None else calls[after].prompt_tokens + calls[after].tokens
    return CallRecord(
        **{
            **packed,
            "prompt_tokens": history + _tuple(packed["prompt_tokens"], "<i4"),
            "tokens": _tuple(packed["tokens"], "<i4"),
            "logprobs": _tuple(packed["logprobs"], "<f4"),
            "reads": tuple(packed.get("reads", ())),
            "kept": tuple(map(tuple, packed["kept"])) if "kept" in packed else None,
        }
    )


def _tuple(text: str, dtype: str) -> tuple[Any, ...]:
    return tuple(np.frombuffer(base64.b64decode(text, validate=True), dtype).tolist())
