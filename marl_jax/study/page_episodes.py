"""What was said, for the page: recorded episodes of training steps and evaluations as plain JSON.

    episodes/*.parquet ──recorded──► {files, tasks, episodes}   short keys, since there are thousands of calls

Who lost it: in a wrong episode that had a right candidate, the first call that read one.
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from marl_jax.rewards.grading import RIGHT
from marl_jax.rollouts import Episode, read_episodes
from marl_jax.rollouts.storage import read_extra
from marl_jax.run_folder.folder import FolderError
from marl_jax.run_folder.json_lines import plain
from marl_jax.study.record import Run, cast_of

BUDGET = 10_000_000  # bytes of JSON as the page has it; of more files, every other one is left out
LONGEST = 6000  # characters shown of one text; the middle of a longer one is left out
TRAINING = "training"  # the kind of file that the page begins with
EARNED = {"w": "reward", "v": "advantage"}
NAMES = re.compile(
    r"(?:step-(?P<step>\d+)|(?P<split>.+)-(?P<at>\d{6})(?:-(?P<mode>.+)-\w{8})?)\.(?:parquet|jsonl\.gz)"
)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """The files that are shown, and what is to be said of the others."""

    files: Sequence[Mapping[str, Any]]  # {step, kind}, in order
    tasks: Sequence[Mapping[str, Any]]  # {id, question, gold}
    episodes: Sequence[Mapping[str, Any]]  # each names its file and its task
    unread: Sequence[str]  # why files could not be read
    left_out: int = 0  # files for which the page has no room
    fewer: int = 0  # episodes of the other files for which it has none


def recorded(run: Run, budget: int = BUDGET) -> Recorded:
    """All recorded episodes of a run that fit; of the first and the last file of a kind there is always something."""
    about = {Path(str(one["episodes"])).name: one for one in run.evaluations if one.get("episodes")}
    paths = (path for path in (run.folder / "episodes").glob("*") if NAMES.fullmatch(path.name))
    there = (_about(path, about.get(path.name, {}), run.config.get("seed")) for path in paths)
    found = sorted(there, key=lambda one: (one[0] != TRAINING, *one))
    read, unread = [], []
    for kind, step, path in found:
        try:
            read.append((kind, step, [_episode(one, calls) for one, calls in paths_of(path)]))
        except (ValueError, OSError, FolderError) as error:
            unread.append(str(error))
    sizes = {id(one): len(inert(one)) for _, _, some in read for one in some}
    total = lambda files: sum(sizes[id(one)] for _, _, some in files for one in some)
    kept: Sequence[Any] = read
    while total(kept) > budget and (fewer := _thinned(kept)) != kept:
        kept = fewer
    left, whole = len(read) - len(kept), kept
    if total(kept) > budget:
        kept = [(kind, step, _within(some, sizes, budget // len(kept))) for kind, step, some in kept]
    cut = sum(len(some) for *_, some in whole) - sum(len(some) for *_, some in kept)
    tasks: dict[str, dict[str, Any]] = {}
    files, episodes = [], []
    for number, (kind, step, some) in enumerate(kept):
        files.append({"kind": kind, "step": step})
        for one in some:
            # By all of it: two splits of one's own tasks may have an id in common.
            task = tasks.setdefault(inert(one["task"]), one["task"] | {"number": len(tasks)})
            episodes.append({**one, "f": number, "t": task["number"]})
            del episodes[-1]["task"]
    return Recorded(files, list(tasks.values()), episodes, unread, left, cut)


def inert(values: Any) -> str:
    """JSON that is no markup within an element of a page: of ASCII alone, without separators of lines."""
    text = json.dumps(plain(values), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def paths_of(path: Path) -> Iterator[tuple[Episode, list[dict[str, Any]]]]:
    """The episodes of one file, path by path where they fork, and what else it says of each call, if it does."""
    table, rows = read_episodes(path).paths()
    earned = {"reward": table.reward, "advantage": table.advantage}
    columns = {name: [column[row] for row in rows] for name, column in read_extra(path).items()}
    columns |= {name: column.tolist() for name, column in earned.items() if column is not None}
    said: list[list[dict[str, Any]]] = [[] for _ in table.bare_episodes]
    for row, number in enumerate(table.episode.tolist()):
        at = {name: column[row] for name, column in columns.items()}
        said[number].append(
            {name: value for name, value in at.items() if value is not None and value == value}
        )
    return zip(table.episodes(), said)


def lost_by(episode: Episode) -> str:
    """The role that read a right candidate of a wrong episode; "nobody" where none did, empty where none was lost."""
    if episode.outcome is None or episode.outcome >= RIGHT:
        return ""
    right = {
        place
        for place, (call, grade) in enumerate(zip(episode.calls, episode.answers))
        if grade is not None and grade >= RIGHT and (call.about or episode.task).id == episode.task.id
    }
    readers = (call.role for call in episode.calls if right & {*call.reads, call.after})
    return next(readers, "nobody") if right else ""


def shortened(said: Any) -> str:
    """A text for the page, without the middle of a very long one."""
    text = "" if said is None else str(said)  # a task of one's own may hold any value
    if len(text) <= LONGEST:
        return text.strip() or "(nothing)"
    half = LONGEST // 2
    return f"{text[:half]}\n\n[… {len(text) - 2 * half:,} characters left out …]\n\n{text[-half:]}"


def _about(path: Path, record: Mapping[str, Any], seed: Any) -> tuple[str, int, Path]:
    """(kind, step, path): of training, or of an evaluation on a split.

    One that was made by a command, with this record, is of a kind with those of its mode, cast and noise alone.
    """
    name = NAMES.fullmatch(path.name)
    assert name
    if name["step"]:
        return TRAINING, int(name["step"]), path
    words = [name["split"], cast_of({**record, "mode": name["mode"]}, seed)]
    return " ".join(filter(None, words)), int(name["at"]), path


def _thinned(files: Sequence[Any]) -> Sequence[Any]:
    """Every other file of each kind, the first and the last always."""
    kinds: dict[str, list[Any]] = {}
    for one in files:
        kinds.setdefault(one[0], []).append(one)
    return [one for some in kinds.values() for one in [*some[:-1:2], *some[-1:]]]


def _within(some: Sequence[Any], sizes: Mapping[int, int], room: int) -> Sequence[Any]:
    """The first problems of a file, whole, as far as there is room; of one that is too large, its first episodes."""
    problems: dict[str, list[Any]] = {}
    for one in some:
        problems.setdefault(one["task"]["id"], []).append(one)
    groups = list(problems.values())
    fits = lambda episodes: sum(sizes[id(one)] for one in episodes) <= room
    if groups and not fits(groups[0]):
        groups = [[one] for one in groups[0]]
    kept: list[Any] = []
    for group in groups:
        if kept and not fits(kept + group):
            break
        kept += group
    return kept


def _episode(episode: Episode, extras: Sequence[dict[str, Any]]) -> dict[str, Any]:
    task = episode.task
    facts = {
        "task": {"id": str(task.id), "question": shortened(task.question), "gold": _text(task.gold)},
        "s": episode.sample,
        "o": episode.outcome,
        "a": _text(episode.answer),
        "e": _text(episode.error),
        "p": ".".join(map(str, episode.path)),
        "lost": lost_by(episode),
        "tools": [
            {
                "x": shortened(f"error: {tool.error}" if tool.error else tool.result),
                "r": tool.name,
                "at": tool.after_call,
            }
            for tool in episode.tools
        ],
    }
    calls = [_call(episode, place, more) for place, more in enumerate(extras)]
    return {**_there(facts), "calls": calls}


def _call(episode: Episode, place: int, more: dict[str, Any]) -> dict[str, Any]:
    call, grades = episode.calls[place], episode.answers
    text, ends, trainer = call.text, more.get("ends"), more.get("trainer_logprobs")
    grade = grades[place] if place < len(grades) else None
    whole = len(text) <= LONGEST
    facts = {
        "r": call.role, "i": call.slot, "j": call.turn, "y": call.policy, "x": shortened(text), "a": _text(call.answer),
        "g": grade, "k": call.kind, "c": call.finish_reason == "length", "u": call.answer is None,
        "d": list(call.reads), "z": len(call.tokens), "p": ".".join(map(str, call.path)),
    }  # fmt: skip
    if ends is not None and whole:  # tokens can be told apart
        facts |= {"x": text, "n": list(ends), "l": [round(float(value), 2) for value in call.logprobs]}
        if trainer is not None and len(trainer) == len(call.logprobs):
            facts["m"] = [round(float(a - b), 5) for a, b in zip(trainer, call.logprobs)]
    facts |= {short: round(more[name], 4) for short, name in EARNED.items() if name in more}
    return _there(facts | ({"q": shortened(more["asked"])} if "asked" in more else {}))


def _there(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is empty; a zero is not."""
    return {name: value for name, value in facts.items() if value or type(value) in (int, float)}


def _text(value: Any) -> str | None:
    return None if value is None else shortened(value)
