"""The math grader: from a response with a boxed answer to a reward of 1 or 0."""

from marl_jax.rewards.math.boxed import extract_boxed
from marl_jax.rewards.math.equivalence import equivalent, grade_math, start_equivalent

__all__ = ["equivalent", "extract_boxed", "grade_math", "start_equivalent"]
