"""Graders, the sandbox, and credit assignment."""

from marl_jax.rewards.asserts import assert_tests
from marl_jax.rewards.code import extract_program, parse_tests, run_program, submit_program
from marl_jax.rewards.compare import same_output, same_value
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
    "equivalent",
    "extract_boxed",
    "extract_program",
    "grade_math",
    "parse_tests",
    "run_program",
    "same_output",
    "same_value",
    "submit_program",
]
