"""The old name of `marl_jax.commands.cli`, for programs of users that import it by this name."""

from marl_jax.commands.cli import *  # noqa: F403
