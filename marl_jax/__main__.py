"""`python -m marl_jax COMMAND ...`: the console command, if it is not on the PATH."""

import sys

from marl_jax.commands.console import main

if __name__ == "__main__":
    sys.exit(main())
