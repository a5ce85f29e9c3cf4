"""Next-token training of a micro base model: a pure function of its recipe.

    loss = sum_t w_t nll_t / sum_t w_t       w: 1 for tokens of a role, `prompt_weight` for tokens of its prompts

Rows are packed into a few long ones, so that little compute is spent on padding; each row attends only to itself.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from annotated_types import Ge, Le

from marl_jax import fields
from marl_jax.errors import UserError
from marl_jax.fields import Count, NotNegative, Positive, Whole
from marl_jax.models import ModelConfig, forward, init
from marl_jax.models.weight_table import Tree
from marl_jax.own import own_function
from marl_jax.pretraining.roles import Skill
from marl_jax.pretraining.transcripts import History, rows, with_lessons

PATIENCE = 1000  # consecutive histories that are too long for a row, before an error is raised


@dataclasses.dataclass(frozen=True)
class Recipe:
    """All settings of a base model."""

    scale: Literal["xs", "s", "m"]  # size of the model
    steps: Count  # optimiser steps
    learning_rate: Positive = 3e-3  # peak of the cosine schedule
    final_ratio: NotNegative = 0.1  # final learning rate, as a share of the peak
    warmup_steps: Whole = 50  # linear warm-up
    weight_decay: NotNegative = 0.01  # weight decay of AdamW
    rows: Count = 8  # packed rows per step
    length: Count = 256  # tokens of a packed row; the few histories that are longer are left out
    prompt_weight: NotNegative = 0.1  # weight of prompt tokens in the loss; that of sampled tokens is 1
    math_levels: tuple[int, ...] = (1,)  # levels of micro_math
    code_levels: tuple[int, ...] = (1, 2)  # levels of micro_code
    # A user's prompts with their answers, each "module:function"; see `transcripts.Lesson`.
    lessons: tuple[str, ...] = ()
    lesson_share: Annotated[float, Ge(0), Le(1)] = 0.5  # share of draws that are lessons; a None makes no row
    skill: Skill = dataclasses.field(default_factory=Skill)  # how often the scripted roles are right
    seed: int = 0  # seed of transcripts and weights

    def __post_init__(self) -> None:
        fields.check(self)
        if not self.levels:
            raise ValueError("math_levels and code_levels are empty: give levels of one of them")

    @property
    def levels(self) -> dict[str, tuple[int, ...]]:
        """{kind of task: its levels}, without kinds that have no levels."""
        return {
            kind: levels
            for kind, levels in (("micro_math", self.math_levels), ("micro_code", self.code_levels))
            if levels
        }


class Batch(NamedTuple):
    """Packed rows of one step."""

    tokens: np.ndarray  # Int[B T]
    segments: np.ndarray  # Int[B T], 0 is padding
    weights: np.ndarray  # Float[B T], weight of each token as a target


def train(
    recipe: Recipe, tokenizer: Any, progress: Callable[[int, jax.Array], None] | None = None
) -> tuple[ModelConfig, Tree]:
    """(config, float32 parameters) of the base; `progress(step, loss)` is called after each dispatch."""
    config = ModelConfig.preset(recipe.scale)
    optimiser = _optimiser(recipe)
    params = init(recipe.seed, config)
    state = optimiser.init(params)
    compiled = dataclasses.replace(recipe, seed=0)  # one program for all seeds
    for step, batch in zip(range(recipe.steps), batches(recipe, tokenizer)):
        params, state, loss = _step(params, state, batch, config, compiled)
        if progress:
            progress(step, loss)
    return config, params


def batches(recipe: Recipe, tokenizer: Any) -> Iterator[Batch]:
    """The batch of each step."""
    options: dict[str, Any] = {"seed": recipe.seed, "skill": recipe.skill, "levels": recipe.levels}
    stream = rows(tokenizer, **options)
    if lessons := [own_function(name, "lesson") for name in recipe.lessons]:
        stream = with_lessons(stream, tokenizer, lessons, recipe.lesson_share, **options)
    return pack(_fitting(stream, recipe.length), recipe.rows, recipe.length, recipe.prompt_weight)


def _fitting(stream: Iterable[History], length: int) -> Iterator[History]:
    too_long = 0
    for row in stream:
        too_long = too_long + 1 if len(row.tokens) > length else 0
        if too_long == PATIENCE:
            raise UserError(f"length is {length}: {too_long} histories in a row are longer, so raise it")
        if not too_long:
            yield row


def pack(stream: Iterable[History], count: int, length: int, prompt_weight: float) -> Iterator[Batch]:
    """Batches of `count` packed rows: each history goes into the first row with room, or into the next batch."""
    batch, used, segments = _empty(count, length)
    for row in stream:
        size = len(row.tokens)
        if not (used + size <= length).any():
            yield batch
            batch, used, segments = _empty(count, length)
        i = int(np.argmax(used + size <= length))
        span = slice(used[i], used[i] + size)
        segments[i] += 1
        batch.tokens[i, span] = row.tokens
        batch.segments[i, span] = segments[i]
        batch.weights[i, span] = np.where(row.sampled, 1, prompt_weight)
        batch.weights[i, used[i]] = 0  # a first token is never a target
        used[i] += size


def _empty(count: int, length: int) -> tuple[Batch, np.ndarray, np.ndarray]:
    """(a batch of padding, tokens used in each of its rows, segments in each)."""
    tokens, segments = np.zeros((count, length), np.int32), np.zeros((count, length), np.int32)
    weights = np.zeros((count, length), np.float32)
    return Batch(tokens, segments, weights), np.zeros(count, int), np.zeros(count, int)


@functools.cache
def _optimiser(recipe: Recipe) -> optax.GradientTransformation:
    peak = recipe.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(
        0, peak, min(recipe.warmup_steps, recipe.steps - 1), recipe.steps, peak * recipe.final_ratio
    )
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=recipe.weight_decay)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


@functools.partial(jax.jit, static_argnames=("config", "recipe"), donate_argnames=("params", "state"))
def _step(
    params: Tree, state: Any, batch: Batch, config: ModelConfig, recipe: Recipe
) -> tuple[Tree, Any, jax.Array]:
    def loss(params: Tree) -> jax.Array:
        logits = forward(params, config, batch.tokens[:, :-1], segment_ids=batch.segments[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.tokens[:, 1:])
        weights = batch.weights[:, 1:]
        return jnp.sum(losses * weights) / jnp.sum(weights)

    value, gradient = jax.value_and_grad(loss)(params)
    updates, state = _optimiser(recipe).update(gradient, state, params)
    return optax.apply_updates(params, updates), state, value
