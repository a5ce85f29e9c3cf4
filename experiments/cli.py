"""What every script shares: --config taken off the command line, and what a user can put right told in a line.

if __name__ == "__main__":
    cli.run(main)          # main(config or None, the arguments that absl left over)
"""

import sys
from collections.abc import Callable

from absl import app, flags, logging

from marl_jax.runs.config import RunConfig, from_argv, split_argv

REFUSED = 2  # exit code of what the user can put right


def run(main: Callable[[RunConfig | None, list[str]], int | None]) -> None:
    """Call main under absl, with the configuration that --config and --config.* ask for; None without them."""
    try:
        spec, texts, rest = split_argv(sys.argv)
        asked = spec is not None or texts
        config = from_argv(sys.argv)[0] if asked else None
    except ValueError as error:  # of a config file, the name of a cell, or a field
        sys.exit(_refusal(error))
    app.run(lambda left: _call(main, config, left[1:]), argv=rest)


def _call(main: Callable[..., int | None], config: RunConfig | None, left: list[str]) -> int | None:
    # Absl makes it INFO where it was not asked for, and libraries would talk into the live view.
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    try:
        return main(config, left)
    except Exception as error:
        if not isinstance(error, _expected()):
            raise
        return _refusal(error)


def _refusal(error: Exception) -> int:
    print(error, file=sys.stderr)
    return REFUSED


def _expected() -> tuple[type[Exception], ...]:
    """Errors whose text is written for the user. Looked up when one is there: some of these modules are heavy."""
    from marl_jax.learning.update import NonFiniteGradients
    from marl_jax.rewards.sandbox.worker import SandboxUnavailable
    from marl_jax.runs.checkpoints import CheckpointError
    from marl_jax.runs.config import ConfigError
    from marl_jax.runs.files import DiskFull
    from marl_jax.runs.folder import FolderError
    from marl_jax.runs.parts import PartsError
    from marl_jax.runs.plan import PlanError
    from marl_jax.tasks.rows import DataError

    return (
        CheckpointError,
        ConfigError,
        DataError,
        DiskFull,
        FolderError,
        NonFiniteGradients,
        PartsError,
        PlanError,
        SandboxUnavailable,
    )
