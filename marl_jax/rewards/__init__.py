"""Graders, the sandbox, and credit assignment."""

from marl_jax.rewards.asserts import assert_tests as assert_tests
from marl_jax.rewards.code import extract_program as extract_program
from marl_jax.rewards.code import parse_tests as parse_tests
from marl_jax.rewards.code import run_program as run_program
from marl_jax.rewards.code import submit_program as submit_program
from marl_jax.rewards.compare import same_output as same_output
from marl_jax.rewards.compare import same_value as same_value
from marl_jax.rewards.math import equivalent as equivalent
from marl_jax.rewards.math import grade_math as grade_math
from marl_jax.rewards.math.boxed import extract_boxed as extract_boxed
from marl_jax.rewards.sandbox.pool import Pool as Pool
from marl_jax.rewards.sandbox.pool import Verdict as Verdict
from marl_jax.rewards.sandbox.worker import SandboxUnavailable as SandboxUnavailable
