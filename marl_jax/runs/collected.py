"""Collected calls: read from files of episodes and drawn task by task, or whole episodes flattened to one role.

    collected/step-000001.parquet, ... ──► units (the episodes of one task in one step) ──draw──► the table of a step

A draw is a pure function of the files, the seed and how many draws came before it in all rounds of the phase: a
permutation of all units, then another one. Episodes of a task stay together, so that calls with one prompt can be
compared.
"""

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from absl import logging

from marl_jax.config.run_config import RunConfig
from marl_jax.episodes import Episode
from marl_jax.learning.estimators.worth import ROW_COLUMNS
from marl_jax.policies import policy_of
from marl_jax.rewards.families import as_response
from marl_jax.rollouts import Chat, read_episodes
from marl_jax.rollouts.running import Ask, Running
from marl_jax.run_folder.folder import FolderError
from marl_jax.runs.loading.parts import Parts
from marl_jax.table import SOLVER, Table
from marl_jax.tasks.iterator import Position, TaskIterator

_EVALUATED = re.compile(r"(.+-)?(train|val|test)-\d{6}(-.+)?\.parquet")
Unit = tuple[Table, list[int]]  # the table of a file, and the numbers of its episodes of one task


def collected_path(folder: Path, step: int) -> Path:
    """The file of the calls of a step."""
    return folder / "collected" / f"step-{step:06d}.parquet"


def files_of(source: str | os.PathLike[str]) -> list[Path]:
    """One file of episodes, or all files of a folder except evaluations, which are no training data."""
    path = Path(os.path.expanduser(source))
    files = [path] if path.is_file() else []
    if path.is_dir():
        files = sorted(file for file in path.glob("*.parquet") if not _EVALUATED.fullmatch(file.name))
    if not files:
        raise FolderError(
            f"source '{path}' is not a file or folder with episodes of training steps: name one that a run has "
            "written, such as RUN/collected"
        )
    return files


def read_calls(path: Path, *, rewarded: bool = True) -> Table:
    """The calls of a file; one that cannot be learned from is refused. `rewarded`: its calls need rewards."""
    try:
        table = read_episodes(path)
    except ValueError as error:
        raise FolderError(f"the calls of a phase: {error}") from None
    if rewarded and table.reward is None:
        raise FolderError(
            f"the calls in '{path}' have no rewards (evaluations have none): take calls of training "
            "steps, or set the phase's flatten, which learns from outcomes"
        )
    return table


def read_units(files: Sequence[Path], *, rewarded: bool = True) -> list[Unit]:
    """The units of some files."""
    units: list[Unit] = []
    for missing in (path for path in files if not path.is_file()):
        raise FolderError(f"the file of calls '{missing}' is missing: restore it, or begin the run anew")
    for path in files:
        table = read_calls(path, rewarded=rewarded)
        by_task: dict[str, list[int]] = {}
        for number, bare in enumerate(table.bare_episodes):
            by_task.setdefault(bare.task.id, []).append(number)
        units += [(table, numbers) for numbers in by_task.values()]
    if not units:
        raise FolderError(f"there is no episode in {len(files)} files of calls: nothing to learn")
    return units


def draw(units: Sequence[Unit], before: int, count: int, seed: int) -> Table:
    """The next `count` units after `before` earlier draws, or all units if there are fewer."""
    count = min(count, len(units))
    epoch, index = divmod(before * count, len(units))
    drawn: Any = next(TaskIterator(cast(Any, units), count, Position(epoch, index, seed)))
    return Table.concat([table.of_episodes(numbers) for table, numbers in drawn])


def with_own_policies(table: Table, config: RunConfig, parts: Parts) -> Table:
    """The calls with the policies that this run's map gives them.

    Roles that the map lacks are refused, and tokens that this run's tokenizers decode to another text.
    """
    if unknown := [role for role in table.present() if role not in config.roles]:
        raise FolderError(
            f"the calls are of role '{unknown[0]}', and the workflow '{config.workflow.name}' only has "
            f"{', '.join(config.roles)}: take calls of this workflow, or set the phase's flatten to one of these"
        )
    try:
        names = [policy_of(config.policies.map, role, slot) for role, slot, _ in table.callers]
    except ValueError as error:
        raise FolderError(f"the calls of a phase: {error}") from None
    decoders = parts.decoders
    for row, (name, text) in enumerate(zip(names, table.text)):
        if (decoded := decoders[name](table.tokens[row].tolist())) != text:
            raise FolderError(
                f"a call's text is {text!r:.60}, but its tokens decode to {decoded!r:.60} for policy '{name}': take "
                "calls of a run with its tokenizer, or set the phase's flatten, which learns from texts"
            )
    policies = tuple(dict.fromkeys(names))
    # Weights and clip ranges of rows are those of the step that made them.
    table = table.replace(**dict.fromkeys(ROW_COLUMNS))
    return table.replace(policies=policies, policy=np.array([policies.index(n) for n in names], np.int32))


def flattened(table: Table, role: str, config: RunConfig, parts: Parts) -> Table:
    """One row of `role` per episode: every call in tags of its own role, with results of tools between them.

    The prompt is the one that this run's workflow opens with. Results of tools are read and not learned; the row's
    reward is the episode's outcome. Every path of an episode that forks is a row; a path without calls is left out.
    """
    policy = policy_of(config.policies.map, role, 0)
    chat = Chat(parts.of_policies(parts.tokenizers)[policy])
    table, _ = table.paths()
    with_calls, first = np.unique(table.episode, return_index=True)
    if dropped := len(table.bare_episodes) - len(with_calls):
        logging.warning("%d of %d episodes have no call and are left out", dropped, len(table.bare_episodes))
    table = table.of_episodes(with_calls.tolist())
    rows, episodes = [_sequence(episode, chat) for episode in table.episodes()], table.bare_episodes
    outcome = [bare.outcome or 0.0 for bare in episodes]
    flat = Table.make(
        role=[role] * len(rows),
        policy=[policy] * len(rows),
        prompt=[_opening(bare, config, parts, chat) for bare in episodes],
        tokens=[tokens for tokens, _ in rows],
        logprobs=[[np.nan] * len(tokens) for tokens, _ in rows],
        spoken=[learned for _, learned in rows],
        episode=range(len(rows)),
        task=[bare.task.id for bare in episodes],
        path=table.path[first],
        sound=[bare.error is None for bare in episodes],
        kind=[SOLVER] * len(rows),
        **dict.fromkeys(("grade", "outcome", "reward"), outcome),
    )
    text, answer = [chat.decode(tokens) for tokens, _ in rows], [bare.answer for bare in episodes]
    labels = (None,) * len(rows)
    return flat.replace(text=tuple(text), answer=tuple(answer), labels=labels, bare_episodes=episodes)


def _sequence(episode: Episode, chat: Chat) -> tuple[list[int], list[bool]]:
    """(tokens, whether each is learned): <role>text</role> for each call, then the answer in its form, and the end."""
    tokens: list[int] = []
    is_learned: list[bool] = []

    def say(text: str, learned: bool = True) -> None:
        ids = chat.spell(text)
        tokens.extend(ids)
        is_learned.extend([learned] * len(ids))

    tools = list(episode.tools)
    for index, call in enumerate(episode.calls):
        while tools and tools[0].after_call < index:
            result = tools.pop(0)
            say(f"<tool>{result.error or result.result}</tool>\n", learned=False)
        say(f"<{call.role}>{call.text.strip()}</{call.role}>\n")
    say("" if episode.answer is None else as_response(episode.task, episode.answer))
    return [*tokens, chat.end_of_turn], [*is_learned, True]


def _opening(bare: Episode, config: RunConfig, parts: Parts, chat: Chat) -> tuple[int, ...]:
    """The tokens of the first prompt that this run's workflow makes of a task."""
    limits = config.rollout.limits
    chat_of = lambda role, slot: chat  # for any role that opens the workflow
    running = Running(bare.task, 0, bare.key or (0,), parts.workflow, parts.prompts, chat_of, limits)
    with contextlib.closing(running):
        calls = [item for item in running.advance() if isinstance(item, Ask)]
    if not calls:
        why = running.error or "flatten needs the prompt of a first call"
        raise FolderError(
            f"the workflow '{config.workflow.name}' begins without a call on task '{bare.task.id}': {why}"
        )
    return tuple(calls[0].prompt)
