"""The math grader: from a response with a boxed answer to a reward of 1 or 0."""

from marl_jax.rewards.math.boxed import extract_boxed as extract_boxed
from marl_jax.rewards.math.equivalence import equivalent as equivalent
from marl_jax.rewards.math.equivalence import grade_math as grade_math
from marl_jax.rewards.math.equivalence import start_equivalent as start_equivalent
