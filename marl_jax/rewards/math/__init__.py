"""The math grader: from a response with a boxed answer to a reward of 1 or 0."""

from typing import TYPE_CHECKING

from marl_jax import late
from marl_jax.rewards.math.boxed import extract_boxed

if TYPE_CHECKING:
    from marl_jax.rewards.math.equivalence import equivalent, grade_math, start_equivalent

__all__ = ["equivalent", "extract_boxed", "grade_math", "start_equivalent"]

__getattr__ = late(__name__, {"equivalence": ("equivalent", "grade_math", "start_equivalent")})
