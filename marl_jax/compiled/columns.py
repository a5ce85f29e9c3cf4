"""The table of a step in arrays: the columns of `marl_jax.table`, with a row for every call that could be made.

    lines of the stage ──table_of──► columns ──worth──► reward, group, advantage ──to_host──► the Table of the house

What was said is padded: prompt [N, P], tokens and logprobs [N, M], with lengths. A call that was not made has length 0,
is not sound and in no group (-1); `to_host` leaves it out.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from marl_jax.compiled.cast import Cast
from marl_jax.compiled.refusal import NoArrayForm
from marl_jax.compiled.script import Cue
from marl_jax.compiled.stage import Line, Stage
from marl_jax.episodes import Episode
from marl_jax.learning.estimators.advantages import overlong_penalty
from marl_jax.learning.estimators.worth import advantages_of, key_of
from marl_jax.rewards.credit import with_rewards
from marl_jax.rewards.families import parse
from marl_jax.rollouts.scheduler import task_key
from marl_jax.table import KINDS, SOLVER, Ragged, Table, dense
from marl_jax.task import Task


class Columns(flax.struct.PyTreeNode):
    """The calls of one step on the device."""

    table: Table  # N = E x C rows: episode by episode, the calls of the script in order
    prompt_length: jax.Array  # Int[N]
    number: jax.Array  # Int[N], of the call in its episode; `table.call` is its place on the stage
    answer: jax.Array  # Int[E], the place of the call that the episode ends with
    logp: Any = None  # [N, M] as the learner computed them; None before it did
    entropy: Any = None  # [N, M]
    ref_logp: Any = None  # [N, M] under the reference, where roles are anchored to one
    beyond: Any = None  # Bool[N], answers that count as wrong because arrays do not know
    cues: tuple[Cue, ...] = flax.struct.field(pytree_node=False, default=())  # of the C calls
    # Of each, the most tokens of its prompt and of what it says.
    widths: tuple[tuple[int, int], ...] = flax.struct.field(pytree_node=False, default=())
    # Of each, whether all episodes of a problem, of which there are several, have the same prompt.
    shared: tuple[bool, ...] = flax.struct.field(pytree_node=False, default=())


def table_of(stage: Stage, answer: jax.Array, versions: Mapping[str, Any]) -> Columns:
    """What was said and read, graded; `answer` Int[E] is the place of the call whose answer an episode ends with."""
    cast, lines, episodes = stage.cast, stage.lines, stage.episodes
    roles, policies = cast.parts.workflow.roles, tuple(cast.parts.specs)
    kinds = [KINDS.index(cast.parts.workflow.kind_of(line.cue.role)) for line in lines]
    widest = lambda of: max(of(line).shape[1] for line in lines)

    def rows(values: Sequence[jax.Array]) -> jax.Array:
        stacked = jnp.stack([jnp.broadcast_to(x, (episodes, *jnp.shape(x)[1:])) for x in values], axis=1)
        return stacked.reshape(episodes * len(lines), *stacked.shape[2:])

    def wide(of, fill=0):  # type: ignore[no-untyped-def]
        most = widest(of)
        return rows(
            [jnp.pad(x, ((0, 0), (0, most - x.shape[1])), constant_values=fill) for x in map(of, lines)]
        )

    def same(values: Sequence[float], dtype: type = np.int32) -> jax.Array:
        return rows([jnp.full((episodes,), value, dtype) for value in values])

    made = rows([line.made for line in lines])
    read = stage.read(lines)
    graded = [jnp.where(line.made, 1.0 * own.right, 0.0) for line, own in zip(lines, read)]
    outcome = jnp.take_along_axis(jnp.stack(graded, axis=1), answer[:, None], axis=1)[:, 0]
    # Answers that another reader than the task's has read have no grade in arrays.
    beyond = [
        own.beyond | (own.readable & ((answer == place) | (kind == SOLVER)) if line.cue.read else False)
        for place, (line, own, kind) in enumerate(zip(lines, read, kinds))
    ]
    alone = jnp.arange(episodes, dtype=jnp.int32)
    places = lambda line: -1 if line.cue.after is None else line.cue.after
    columns = Table(
        episode=jnp.repeat(alone, len(lines)),
        task=jnp.repeat(alone // cast.samples, len(lines)),
        path=same([-1] * len(lines))[:, None],
        call=same(range(len(lines))),
        role=same([roles.index(line.cue.role) for line in lines]),
        slot=same([line.cue.slot for line in lines]),
        turn=same([line.cue.turn for line in lines]),
        policy=same([policies.index(line.policy) for line in lines]),
        version=rows([jnp.full((episodes,), versions.get(line.policy, 0), jnp.int32) for line in lines]),
        reads=wide(lambda line: line.reads, -1),
        after=jnp.where(made, same([places(line) for line in lines]), -1),
        prompt=wide(lambda line: line.prompt[0]),
        tokens=wide(lambda line: line.tokens),
        logprobs=wide(lambda line: line.logprobs),
        kept=None,
        length=rows([line.length for line in lines]),
        temperature=same([cast.settings[line.cue.role].temperature for line in lines], np.float32),
        truncated=rows([_truncated(cast, line) for line in lines]),
        cut=jnp.where(made, rows([line.cut for line in lines]), 0),
        kind=same(kinds),
        readable=rows([own.readable for own in read]),
        choice=rows([jnp.where(line.made, own.choice, -1) for line, own in zip(lines, read)]),
        sound=made,
        grade=rows(
            [own if kind == SOLVER else jnp.full_like(own, jnp.nan) for own, kind in zip(graded, kinds)]
        ),
        outcome=jnp.repeat(outcome, len(lines)),
        roles=roles,
        policies=policies,
    )
    shown = rows([line.prompt[1] for line in lines])
    number = jnp.cumsum(made.reshape(episodes, -1), axis=1).reshape(-1) - 1
    return Columns(
        columns,
        jnp.where(made, shown, 0),
        number,
        answer,
        beyond=made & rows(beyond),
        cues=tuple(line.cue for line in lines),
        widths=tuple((line.prompt[0].shape[1], line.tokens.shape[1]) for line in lines),
        shared=tuple(line.by_task for line in lines),
    )


def _truncated(cast: Cast, line: Line) -> jax.Array:
    """It has no stop token at its end."""
    last = jnp.take_along_axis(line.tokens, jnp.maximum(line.length - 1, 0)[:, None], axis=1)
    return line.made & ~jnp.any(last == cast.stops[line.cue.role], axis=1)


def worth(cast: Cast, columns: Columns) -> Columns:
    """With components and rewards, groups and advantages: by the functions that the hosted road runs.

    In float64, as numpy computes there; kept in float32, as advantages are there, too.
    """
    config, table = cast.config.advantages, columns.table
    made = table.length > 0
    fields = key_of(config, cast.parts.workflow.groups)[1:]  # the first is the task
    within = dense(tuple(getattr(cue, field) for field in fields) for cue in columns.cues)
    group = table.task * len(within) + jnp.tile(jnp.asarray(within), len(made) // len(within))
    group = jnp.where(made, group, -1)
    with jax.enable_x64(True):
        double = lambda x: x.astype(jnp.float64)
        exact = with_rewards(
            table.replace(grade=double(table.grade), outcome=double(table.outcome)), cast.parts.credit
        )
        rewards, penalty = exact.reward, None
        if config.overlong is not None:
            most, buffer = config.overlong
            penalty = overlong_penalty(table.length, max_length=most, buffer=buffer)
            rewards = rewards + penalty
        rewards = rewards.astype(jnp.float32)
        advantage = advantages_of(config, rewards, jnp.where(made, table.task, -1), table.role, group)
        single = lambda x: x.astype(jnp.float32)
        components = {name: single(values) for name, values in exact.components.items()}
        reward, advantage = single(exact.reward), jnp.where(made, advantage, 0.0)
    return columns.replace(
        table=table.replace(
            components=components, reward=reward, penalty=penalty, group=group, advantage=single(advantage)
        )
    )


def to_host(cast: Cast, columns: Columns, tasks: Sequence[Task], *, seed: int = 0, step: int = 0) -> Table:
    """The step as the Table of the house: the calls that were made, in order, with texts and answers.

    Texts are read here by the hosted readers; grades, rewards and advantages are those of the device.
    """
    columns = jax.tree.map(np.asarray, columns)
    if (shape := columns.answer.shape) != (len(tasks) * cast.samples,):
        raise ValueError(
            f"columns of {list(shape)} episodes are not those of {len(tasks)} problems by {cast.samples} samples: give "
            "the problems of their step, and where seeds or devices have an axis, one of them at a time"
        )
    places, made = len(columns.cues), np.flatnonzero(columns.table.length)
    # Episodes and problems of a shard count from 0 in its own columns; rows count over all shards.
    table, (owner, place) = columns.table.take(made), np.divmod(made, places)
    problems, length = (owner // cast.samples).tolist(), table.length
    text = tuple(cast.alphabet.text(row[:n]) for row, n in zip(table.tokens, length))

    @functools.cache  # the episodes of a problem often say the same
    def answer_in(said: str, problem: int, read: Callable[[str], str | None] | None) -> str | None:
        return read(said) if read else parse(tasks[problem], said)

    answer = tuple(map(answer_in, text, problems, (columns.cues[i].read for i in place.tolist())))
    number = columns.number.reshape(-1, places)
    in_order = lambda shown: np.where(shown < 0, -1, number[owner[:, None], shown])
    row_of = np.full(number.size, -1)
    row_of[made] = np.arange(len(made))
    inside = (columns.answer >= 0) & (columns.answer < places)
    ends = np.where(inside, row_of[np.arange(len(number)) * places + np.where(inside, columns.answer, 0)], -1)
    if (ends < 0).any():
        raise NoArrayForm("a form ends an episode with the answer of a call that the episode did not make")
    name, outcome = cast.parts.workflow.name, columns.table.outcome.reshape(-1, places)[:, 0].tolist()
    key = lambda task, sample: (seed, step, task_key(task), sample)
    return table.replace(
        episode=owner.astype(np.int32),
        task=dense(tasks[i].id for i in problems),
        call=number[owner, place],
        reads=in_order(table.reads),
        after=in_order(table.after[:, None])[:, 0],
        prompt=Ragged.of_padded(table.prompt, np.asarray(columns.prompt_length)[made]),
        tokens=Ragged.of_padded(table.tokens, length),
        logprobs=Ragged.of_padded(table.logprobs, length),
        temperature=np.array([cast.settings[role].temperature for role in table.roles])[table.role],
        readable=np.array([one is not None for one in answer], bool),
        group=dense(zip(problems, table.group.tolist())),  # a group is of one problem
        text=text,
        answer=answer,
        labels=(None,) * len(made),
        bare_episodes=tuple(
            Episode(task, sample, name, (), answer[end], key=key(task, sample), outcome=value)
            for (task, sample), end, value in zip(
                itertools.product(tasks, range(cast.samples)), ends.tolist(), outcome
            )
        ),
    )
