"""The table of a step in arrays: the columns of `marl_jax.table`, with a row for every call that could be made.

    lines of the stage ──table_of──► columns ──with_advantages──► reward, group, advantage ──to_host──► hosted Table

Prompts [N, P], tokens and logprobs [N, M] are padded, with lengths. A call that was not made has length 0, is not
sound and has no group (-1); `to_host` leaves it out. The place of a call is its index in `Stage.lines` and `cues`.
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
from marl_jax.compiled.stage import OUTSIDE, Stage, StageCall
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
    number: jax.Array  # Int[N], number of the call among those made in its episode; `table.call` is its place
    answer: jax.Array  # Int[E], place of the call whose answer ends the episode
    logp: Any = None  # [N, M] computed by the learner; 0 before its update, None before `learn.before_update`
    entropy: Any = None  # [N, M]
    ref_logp: Any = None  # [N, M] under the reference; None if no role has a kl_coef
    beyond: Any = None  # Bool[N], answers that arrays cannot grade; they count as wrong
    cues: tuple[Cue, ...] = flax.struct.field(pytree_node=False, default=())  # the C calls of the script
    # Per call: the widths of its prompt and of its completion, in tokens.
    widths: tuple[tuple[int, int], ...] = flax.struct.field(pytree_node=False, default=())
    # Per call: True if a problem has several episodes and all of them have the same prompt.
    shared: tuple[bool, ...] = flax.struct.field(pytree_node=False, default=())


def table_of(stage: Stage, answer: jax.Array, versions: Mapping[str, Any]) -> Columns:
    """The graded table of all calls; `answer` Int[E] is the place of the call whose answer ends an episode."""
    cast, lines, episodes = stage.cast, stage.lines, stage.episodes
    answer = jnp.where(stage.astray, OUTSIDE, answer)
    roles, policies = cast.parts.workflow.roles, tuple(cast.parts.specs)
    kinds = [KINDS.index(cast.parts.workflow.kind_of(line.cue.role)) for line in lines]

    def rows(values: Sequence[jax.Array]) -> jax.Array:
        stacked = jnp.stack([jnp.broadcast_to(x, (episodes, *jnp.shape(x)[1:])) for x in values], axis=1)
        return stacked.reshape(episodes * len(lines), *stacked.shape[2:])

    def padded(of, fill=0):  # type: ignore[no-untyped-def]
        values = [of(line) for line in lines]
        most = max(x.shape[1] for x in values)
        return rows([jnp.pad(x, ((0, 0), (0, most - x.shape[1])), constant_values=fill) for x in values])

    constant = lambda values, dtype=np.int32: rows([jnp.full((episodes,), value, dtype) for value in values])
    made = rows([line.made for line in lines])
    results = stage.read(lines)
    graded = [jnp.where(line.made, 1.0 * result.right, 0.0) for line, result in zip(lines, results)]
    outcome = jnp.take_along_axis(jnp.stack(graded, axis=1), answer[:, None], axis=1)[:, 0]
    # Only answers of the task's own reader can be graded in arrays.
    beyond = [
        result.beyond | (result.readable & ((answer == place) | (kind == SOLVER)) if line.cue.read else False)
        for place, (line, result, kind) in enumerate(zip(lines, results, kinds))
    ]
    episode = jnp.arange(episodes, dtype=jnp.int32)
    after = [-1 if line.cue.after is None else line.cue.after for line in lines]
    table = Table(
        episode=jnp.repeat(episode, len(lines)),
        task=jnp.repeat(episode // cast.samples, len(lines)),
        path=constant([-1] * len(lines))[:, None],
        call=constant(range(len(lines))),
        role=constant([roles.index(line.cue.role) for line in lines]),
        slot=constant([line.cue.slot for line in lines]),
        turn=constant([line.cue.turn for line in lines]),
        policy=constant([policies.index(line.policy) for line in lines]),
        version=constant([versions.get(line.policy, 0) for line in lines]),
        reads=padded(lambda line: line.reads, -1),
        after=jnp.where(made, constant(after), -1),
        prompt=padded(lambda line: line.prompt[0]),
        tokens=padded(lambda line: line.tokens),
        logprobs=padded(lambda line: line.logprobs),
        kept=None,
        length=rows([line.length for line in lines]),
        temperature=constant([cast.settings[line.cue.role].temperature for line in lines], np.float32),
        truncated=rows([_truncated(cast, line) for line in lines]),
        cut=jnp.where(made, rows([line.cut for line in lines]), 0),
        kind=constant(kinds),
        readable=rows([result.readable for result in results]),
        choice=rows([jnp.where(line.made, result.choice, -1) for line, result in zip(lines, results)]),
        sound=made,
        grade=rows([x if kind == SOLVER else jnp.full_like(x, jnp.nan) for x, kind in zip(graded, kinds)]),
        outcome=jnp.repeat(outcome, len(lines)),
        roles=roles,
        policies=policies,
    )
    prompt_length = rows([line.prompt[1] for line in lines])
    number = jnp.cumsum(made.reshape(episodes, -1), axis=1).reshape(-1) - 1
    return Columns(
        table,
        jnp.where(made, prompt_length, 0),
        number,
        answer,
        beyond=made & rows(beyond),
        cues=tuple(line.cue for line in lines),
        widths=tuple((line.prompt[0].shape[1], line.tokens.shape[1]) for line in lines),
        shared=tuple(line.by_task for line in lines),
    )


def _truncated(cast: Cast, line: StageCall) -> jax.Array:
    """Bool[E]: the call was made and does not end with a stop token."""
    last = jnp.take_along_axis(line.tokens, jnp.maximum(line.length - 1, 0)[:, None], axis=1)
    return line.made & ~jnp.any(last == cast.stops[line.cue.role], axis=1)


def with_advantages(cast: Cast, columns: Columns) -> Columns:
    """Add reward components, rewards, groups and advantages, by the functions of the hosted road.

    Rewards and sums are computed in float64, as numpy does there, and stored in float32, as advantages are there, too.
    """
    config, table = cast.config.advantages, columns.table
    made = table.length > 0
    fields = key_of(config, cast.parts.workflow.groups)[1:]  # the first is the task
    within = dense(tuple(getattr(cue, field) for field in fields) for cue in columns.cues)
    group = table.task * len(within) + jnp.tile(jnp.asarray(within), len(made) // len(within))
    group = jnp.where(made, group, -1)
    with jax.enable_x64(True):
        double = lambda x: x.astype(jnp.float64)
        graded = table.replace(grade=double(table.grade), outcome=double(table.outcome))
        exact = with_rewards(graded, cast.parts.credit)
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
    table = table.replace(components=components, reward=reward, penalty=penalty)
    return columns.replace(table=table.replace(group=group, advantage=single(advantage)))


def to_host(cast: Cast, columns: Columns, tasks: Sequence[Task], *, seed: int = 0, step: int = 0) -> Table:
    """The step as a hosted `Table`: the calls that were made, in order, with texts and answers.

    The hosted readers read the answers here; grades, rewards and advantages come from the device.
    """
    columns = jax.tree.map(np.asarray, columns)
    if (shape := columns.answer.shape) != (len(tasks) * cast.samples,):
        raise ValueError(
            f"columns of {list(shape)} episodes do not fit {len(tasks)} problems by {cast.samples} samples: give the "
            "problems of the same step and, if there is an axis of seeds or devices, one entry of it at a time"
        )
    C, made = len(columns.cues), np.flatnonzero(columns.table.length)
    # The columns of each shard number episodes and problems from 0, so their numbers are taken from the rows.
    table, (episode, place) = columns.table.take(made), np.divmod(made, C)
    problems, length = (episode // cast.samples).tolist(), table.length
    text = tuple(cast.alphabet.text(row[:n]) for row, n in zip(table.tokens, length))

    @functools.cache  # episodes of a problem often have equal completions
    def answer_in(completion: str, problem: int, read: Callable[[str], str | None] | None) -> str | None:
        return read(completion) if read else parse(tasks[problem], completion)

    answer = tuple(map(answer_in, text, problems, (columns.cues[i].read for i in place.tolist())))
    number = columns.number.reshape(-1, C)
    numbers_of = lambda calls: np.where(calls < 0, -1, number[episode[:, None], calls])
    row_of = np.full(number.size, -1)
    row_of[made] = np.arange(len(made))
    valid = (columns.answer >= 0) & (columns.answer < C)
    ends = np.where(valid, row_of[np.arange(len(number)) * C + np.where(valid, columns.answer, 0)], -1)
    if (ends < 0).any():
        raise NoArrayForm(
            "the form follows a text that is not there, or ends an episode with the answer of a call not made there"
        )
    name, outcome = cast.parts.workflow.name, columns.table.outcome.reshape(-1, C)[:, 0].tolist()
    key = lambda task, sample: (seed, step, task_key(task), sample)
    samples = itertools.product(tasks, range(cast.samples))
    return table.replace(
        episode=episode.astype(np.int32),
        task=dense(tasks[i].id for i in problems),
        call=number[episode, place],
        reads=numbers_of(table.reads),
        after=numbers_of(table.after[:, None])[:, 0],
        prompt=Ragged.of_padded(table.prompt, np.asarray(columns.prompt_length)[made]),
        tokens=Ragged.of_padded(table.tokens, length),
        logprobs=Ragged.of_padded(table.logprobs, length),
        temperature=np.array([cast.settings[role].temperature for role in table.roles])[table.role],
        readable=np.array([a is not None for a in answer], bool),
        group=dense(zip(problems, table.group.tolist())),  # a group contains calls of one problem only
        text=text,
        answer=answer,
        labels=(None,) * len(made),
        bare_episodes=tuple(
            Episode(task, sample, name, (), answer[end], key=key(task, sample), outcome=value)
            for (task, sample), end, value in zip(samples, ends.tolist(), outcome)
        ),
    )
