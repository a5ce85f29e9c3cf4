"""What a program of one's own begins with: `cli.train(workdir, *flags)`, or `cli.run(main)`."""

from marl_jax.commands.cli import PATIENCE, REFUSED, define_accept_changes, no_config, run, train

__all__ = ["PATIENCE", "REFUSED", "define_accept_changes", "no_config", "run", "train"]
