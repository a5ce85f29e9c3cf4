"""Graders, the sandbox, and credit assignment.

Names are imported at first use: graders' workers do not load JAX, and --help does not load graders.
"""

from typing import TYPE_CHECKING

from marl_jax import late

if TYPE_CHECKING:
    from marl_jax.rewards.asserts import assert_tests
    from marl_jax.rewards.code import parse_tests, run_program, submit_program
    from marl_jax.rewards.compare import same_output, same_value
    from marl_jax.rewards.credit import (
        by_episodes,
        outcome,
        own_correctness,
        team_and_local,
        voting_rubric,
        with_rewards,
    )
    from marl_jax.rewards.fences import extract_program
    from marl_jax.rewards.grading import grade
    from marl_jax.rewards.math import equivalent, grade_math
    from marl_jax.rewards.math.boxed import extract_boxed
    from marl_jax.rewards.sandbox.pool import Pool
    from marl_jax.rewards.sandbox.verdicts import Verdict
    from marl_jax.rewards.sandbox.worker import SandboxUnavailable

__all__ = [
    "Pool",
    "SandboxUnavailable",
    "Verdict",
    "assert_tests",
    "by_episodes",
    "equivalent",
    "extract_boxed",
    "extract_program",
    "grade",
    "grade_math",
    "outcome",
    "own_correctness",
    "parse_tests",
    "run_program",
    "same_output",
    "same_value",
    "submit_program",
    "team_and_local",
    "voting_rubric",
    "with_rewards",
]

__getattr__ = late(
    __name__,
    {
        "asserts": ("assert_tests",),
        "code": ("parse_tests", "run_program", "submit_program"),
        "compare": ("same_output", "same_value"),
        "credit": (
            "by_episodes",
            "outcome",
            "own_correctness",
            "team_and_local",
            "voting_rubric",
            "with_rewards",
        ),
        "fences": ("extract_program",),
        "grading": ("grade",),
        "math": ("equivalent", "grade_math"),
        "math.boxed": ("extract_boxed",),
        "sandbox.pool": ("Pool",),
        "sandbox.verdicts": ("Verdict",),
        "sandbox.worker": ("SandboxUnavailable",),
    },
)
