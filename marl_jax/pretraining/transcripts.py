"""Transcripts: workflows on micro tasks, played by scripted roles.

    task, workflow ──play──► Episode ──histories──► one row of tokens per history, with the roles' tokens marked

Episodes run on the scheduler's own code (`rollouts.running`), so every prompt equals, token for token, the one that an
engine would get. A history of several turns is one row; of a role's parallel calls only the first slot makes rows.
"""

import dataclasses
import functools
import itertools
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from marl_jax.episodes import CallRecord, Episode
from marl_jax.pretraining.roles import SCRIPTS, Skill, run_scripted, say
from marl_jax.rewards import families
from marl_jax.rollouts.history import Chat
from marl_jax.rollouts.running import Ask, Limits, Running
from marl_jax.rollouts.tools import run_tool
from marl_jax.task import Task
from marl_jax.tasks import micro
from marl_jax.workflows import (
    BUILT_IN,
    Prompts,
    Workflow,
    eval_opt,
    load_prompts,
    self_refine_with_tests,
    single_matched,
    single_token_matched,
)

# Makes a user's prompt about a training problem, and its answer; None if there is no lesson about this problem.
Lesson = Callable[[Task, random.Random, Skill], tuple[str, str] | None]

# Weight of each workflow in the draw; workflows that are not listed have weight 1.
SHARES = {"single": 12, "voting": 2, "eval_opt": 2, "orch_workers": 2}


@dataclasses.dataclass(frozen=True)
class History:
    """One history: its tokens, and which of them a role sampled."""

    tokens: np.ndarray  # Int[T]
    sampled: np.ndarray  # Bool[T]


def rows(
    tokenizer: Any, *, seed: int = 0, skill: Skill | None = None, levels: Mapping[str, Sequence[int]]
) -> Iterator[History]:
    """An endless stream of rows: kinds of task ({kind: levels}) take turns, workflows are drawn by their shares."""
    for episode in episodes(tokenizer, seed=seed, skill=skill, levels=levels):
        yield from histories(episode)


def with_lessons(
    stream: Iterator[History],
    tokenizer: Any,
    lessons: Sequence[Lesson],
    share: float,
    *,
    seed: int = 0,
    skill: Skill | None = None,
    levels: Mapping[str, Sequence[int]],
) -> Iterator[History]:
    """The stream and lessons, drawn evenly, on separate training problems: `share` of the rows if no lesson is None."""
    chat, rng = Chat(tokenizer), random.Random(f"lessons {seed}")
    problems = itertools.cycle(
        micro.stream(kind, "train", seed=seed + 1, levels=chosen) for kind, chosen in levels.items()
    )
    for row in stream:
        while rng.random() < share:
            if lesson := rng.choice(lessons)(next(next(problems)), rng, skill or Skill()):
                yield _lesson(chat, *lesson)
        yield row


def _lesson(chat: Chat, prompt: str, answer: str) -> History:
    shown = chat.start([{"role": "user", "content": prompt}])
    ids = (*chat.tokenizer.encode(answer, add_special_tokens=False), chat.end_of_turn)
    return History(np.array(shown + ids, np.int32), np.arange(len(shown) + len(ids)) >= len(shown))


def episodes(
    tokenizer: Any, *, seed: int = 0, skill: Skill | None = None, levels: Mapping[str, Sequence[int]]
) -> Iterator[Episode]:
    """An endless stream of episodes on training problems, a pure function of the arguments."""
    chat, rng = Chat(tokenizer), random.Random(f"transcripts {seed}")
    streams = {kind: micro.stream(kind, "train", seed=seed, levels=chosen) for kind, chosen in levels.items()}
    number = 0
    while True:
        for stream in streams.values():
            task = next(stream)
            played = flows(task.family)
            (name,) = rng.choices(list(played), [SHARES.get(name, 1) for name in played])
            yield play(task, played[name], _prompts(task.family), chat, rng, skill or Skill(), number)
            number += 1


def play(
    task: Task,
    flow: Workflow,
    prompts: Prompts,
    chat: Chat,
    rng: random.Random,
    skill: Skill,
    number: int = 0,
) -> Episode:
    """One episode of the workflow with scripted roles."""
    running = Running(task, number, (number,), flow, prompts, lambda role, slot: chat, Limits())
    while batch := running.advance():
        for position, item in enumerate(batch):
            if isinstance(item, Ask):
                ids = chat.tokenizer.encode(say(task, item.call, rng, skill), add_special_tokens=False)
                tokens = [*ids, chat.end_of_turn]
                completion = types.SimpleNamespace(
                    tokens=tokens, logprobs=[0.0] * len(tokens), finish_reason="stop"
                )
                running.give_call(position, completion, families.parse, policy="script")
            else:
                running.put(position, run_tool(item))
    episode = running.episode()
    if episode.error:
        raise RuntimeError(f"a scripted episode of '{flow.name}' on '{task.id}' failed: {episode.error}")
    return episode


def turns(episode: Episode) -> Iterator[list[CallRecord]]:
    """The calls of each history of a role's first slot, last call first; only histories that no call continues."""
    continued = {call.after for call in episode.calls}
    for index, call in enumerate(episode.calls):
        if index not in continued and not call.slot:
            chain = [call]
            while (link := chain[-1].after) is not None:
                chain.append(episode.calls[link])
            yield chain


def histories(episode: Episode) -> list[History]:
    """The rows of an episode."""
    made = []
    for chain in turns(episode):
        tokens = np.array(chain[0].prompt_tokens + chain[0].tokens, np.int32)
        sampled = np.zeros(len(tokens), bool)
        for turn in chain:
            sampled[len(turn.prompt_tokens) :][: len(turn.tokens)] = True
        made.append(History(tokens, sampled))
    return made


@functools.cache
def flows(family: str) -> dict[str, Workflow]:
    """The workflows of a family whose roles all have scripts, as they are played; eval_opt in both its forms."""
    known = (
        flow for flow in BUILT_IN.values() if family in flow.families and SCRIPTS.keys() >= set(flow.roles)
    )
    played = {flow.name: flow for flow in known}
    played["eval_opt shared"] = eval_opt.bind(shared=True)
    # Only first slots make rows, so one call is enough; programs written here need no sandbox.
    for flow in (single_matched, single_token_matched):
        played[flow.name] = flow.bind(calls=1)
    if family == "code":
        played[self_refine_with_tests.name] = self_refine_with_tests.bind(run=run_scripted)
    return played


@functools.cache
def _prompts(family: str) -> Prompts:
    return load_prompts(family, "micro")
