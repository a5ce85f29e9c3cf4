"""`marl_jax.commands.cli` by the name that programs of one's own once imported it by."""

from marl_jax.commands.cli import *  # noqa: F403
