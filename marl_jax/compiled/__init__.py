"""The compiled road: a whole training step as one pure jitted function, for cells with a form in arrays."""

from marl_jax.compiled.cast import cast_of
from marl_jax.compiled.columns import Columns, to_host
from marl_jax.compiled.refusal import NoArrayForm
from marl_jax.compiled.step import (
    Halves,
    State,
    Step,
    Tasks,
    batches,
    make_halves,
    make_step,
    noise_words,
    problems,
    start,
    state_of,
    tasks_of,
)

__all__ = [
    "Columns",
    "Halves",
    "NoArrayForm",
    "State",
    "Step",
    "Tasks",
    "batches",
    "cast_of",
    "make_halves",
    "make_step",
    "noise_words",
    "problems",
    "start",
    "state_of",
    "tasks_of",
    "to_host",
]
