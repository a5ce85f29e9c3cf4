"""Recorded episodes of training steps and evaluations, as plain JSON for the page.

    episodes/*.parquet ──recorded──► {files, tasks, episodes}   short keys, since there are thousands of calls

The role that lost a right answer: in a wrong episode with a right candidate, that of the first call that read one.
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

BUDGET = 10_000_000  # bytes of JSON in the page; if files need more, every other one is left out
LONGEST = 6000  # characters shown of one text; the middle of a longer one is left out
TRAINING = "training"  # the kind of file that the page shows first
EARNED = {"w": "reward", "v": "advantage"}
NAMES = re.compile(
    r"(?:step-(?P<step>\d+)|(?P<split>.+)-(?P<at>\d{6})(?:-(?P<mode>.+)-\w{8})?)\.(?:parquet|jsonl\.gz)"
)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """The files that are shown, and how much is left out."""

    files: Sequence[Mapping[str, Any]]  # {step, kind}, in order
    tasks: Sequence[Mapping[str, Any]]  # {id, question, gold}
    episodes: Sequence[Mapping[str, Any]]  # each names its file and its task
    unread: Sequence[str]  # why files could not be read
    left_out: int = 0  # files for which the page has no room
    fewer: int = 0  # episodes of the shown files for which the page has no room


def recorded(run: Run, budget: int = BUDGET) -> Recorded:
    """The recorded episodes of a run that fit; the first and the last file of a kind always have some."""
    records = {Path(str(one["episodes"])).name: one for one in run.evaluations if one.get("episodes")}
    paths = (path for path in (run.folder / "episodes").glob("*") if NAMES.fullmatch(path.name))
    named = (_kind_of_file(path, records.get(path.name, {}), run.config.get("seed")) for path in paths)
    found = sorted(named, key=lambda one: (one[0] != TRAINING, *one))
    read, unread = [], []
    for kind, step, path in found:
        try:
            read.append((kind, step, [_episode(one, calls) for one, calls in paths_of(path)]))
        except (ValueError, OSError, FolderError) as error:
            unread.append(str(error))
    sizes = {id(one): len(inert(one)) for _, _, played in read for one in played}
    total = lambda files: sum(sizes[id(one)] for _, _, played in files for one in played)
    kept: Sequence[Any] = read
    while total(kept) > budget and (fewer := _thinned(kept)) != kept:
        kept = fewer
    left_out, uncut = len(read) - len(kept), kept
    if total(kept) > budget:
        kept = [(kind, step, _within(played, sizes, budget // len(kept))) for kind, step, played in kept]
    cut = sum(len(played) for *_, played in uncut) - sum(len(played) for *_, played in kept)
    tasks: dict[str, dict[str, Any]] = {}
    files, episodes = [], []
    for number, (kind, step, played) in enumerate(kept):
        files.append({"kind": kind, "step": step})
        for one in played:
            # The key is the complete task: two splits of a user's tasks may have an id in common.
            task = tasks.setdefault(inert(one["task"]), one["task"] | {"number": len(tasks)})
            episodes.append({**one, "f": number, "t": task["number"]})
            del episodes[-1]["task"]
    return Recorded(files, list(tasks.values()), episodes, unread, left_out, cut)


def inert(values: Any) -> str:
    """JSON that is no markup inside an element of a page: only ASCII, without line separators."""
    text = json.dumps(plain(values), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def paths_of(path: Path) -> Iterator[tuple[Episode, list[dict[str, Any]]]]:
    """The episodes of one file, one for each path if they fork, each with the further columns of its calls."""
    table, rows = read_episodes(path).paths()
    earned = {"reward": table.reward, "advantage": table.advantage}
    columns = {name: [column[row] for row in rows] for name, column in read_extra(path).items()}
    columns |= {name: column.tolist() for name, column in earned.items() if column is not None}
    extras: list[list[dict[str, Any]]] = [[] for _ in table.bare_episodes]
    for row, number in enumerate(table.episode.tolist()):
        values = {name: column[row] for name, column in columns.items()}
        extras[number].append(
            {name: value for name, value in values.items() if value is not None and value == value}
        )
    return zip(table.episodes(), extras)


def lost_by(episode: Episode) -> str:
    """The first role that read a right candidate in a wrong episode; "nobody" if none did, empty if none was lost."""
    if episode.outcome is None or episode.outcome >= RIGHT:
        return ""
    right = {
        i
        for i, (call, grade) in enumerate(zip(episode.calls, episode.answers))
        if grade is not None and grade >= RIGHT and (call.about or episode.task).id == episode.task.id
    }
    readers = (call.role for call in episode.calls if right & {*call.reads, call.after})
    return next(readers, "nobody") if right else ""


def shortened(value: Any) -> str:
    """A text for the page, without the middle of a very long one."""
    text = "" if value is None else str(value)  # a user's task may contain any value
    if len(text) <= LONGEST:
        return text.strip() or "(nothing)"
    half = LONGEST // 2
    return f"{text[:half]}\n\n[… {len(text) - 2 * half:,} characters left out …]\n\n{text[-half:]}"


def _kind_of_file(path: Path, record: Mapping[str, Any], seed: Any) -> tuple[str, int, Path]:
    """(kind, step, path) of a file of training, or of an evaluation on a split.

    For an evaluation that a command made, of which `record` is the line, the kind has its mode, cast and noise, too.
    """
    name = NAMES.fullmatch(path.name)
    assert name
    if name["step"]:
        return TRAINING, int(name["step"]), path
    words = [name["split"], cast_of({**record, "mode": name["mode"]}, seed)]
    return " ".join(filter(None, words)), int(name["at"]), path


def _thinned(files: Sequence[Any]) -> Sequence[Any]:
    """Every other file of each kind, always with the first and the last."""
    kinds: dict[str, list[Any]] = {}
    for one in files:
        kinds.setdefault(one[0], []).append(one)
    return [one for some in kinds.values() for one in [*some[:-1:2], *some[-1:]]]


def _within(episodes: Sequence[Any], sizes: Mapping[int, int], room: int) -> Sequence[Any]:
    """All episodes of the first problems that fit; of a first problem that does not fit, its first episodes."""
    problems: dict[str, list[Any]] = {}
    for one in episodes:
        problems.setdefault(one["task"]["id"], []).append(one)
    groups = list(problems.values())
    fits = lambda group: sum(sizes[id(one)] for one in group) <= room
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
        "task": {"id": str(task.id), "question": shortened(task.question), "gold": _text(task.gold or None)},
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
    calls = [_call(episode, i, more) for i, more in enumerate(extras)]
    return {**_nonempty(facts), "calls": calls}


def _call(episode: Episode, i: int, more: dict[str, Any]) -> dict[str, Any]:
    call, grades = episode.calls[i], episode.answers
    text, ends, trainer = call.text, more.get("ends"), more.get("trainer_logprobs")
    grade = grades[i] if i < len(grades) else None
    complete = len(text) <= LONGEST
    facts = {
        "r": call.role, "i": call.slot, "j": call.turn, "y": call.policy, "x": shortened(text), "a": _text(call.answer),
        "g": grade, "k": call.kind, "c": call.finish_reason == "length", "u": call.answer is None,
        "d": list(call.reads), "z": len(call.tokens), "p": ".".join(map(str, call.path)),
    }  # fmt: skip
    if ends is not None and complete and text:  # the page can show the tokens of the text
        facts |= {"x": text, "n": list(ends), "l": [round(float(value), 2) for value in call.logprobs]}
        if trainer is not None and len(trainer) == len(call.logprobs):
            facts["m"] = [round(float(a - b), 5) for a, b in zip(trainer, call.logprobs)]
    facts |= {short: round(more[name], 4) for short, name in EARNED.items() if name in more}
    return _nonempty(facts | ({"q": shortened(more["asked"])} if "asked" in more else {}))


def _nonempty(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that are not empty; a zero is not empty."""
    return {name: value for name, value in facts.items() if value or type(value) in (int, float)}


def _text(value: Any) -> str | None:
    return None if value is None else shortened(value)
