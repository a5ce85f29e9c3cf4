"""The commands, as modules that `python -m` runs."""

import signal
import sys

# While a command imports its packages, Ctrl-C ends the process: Python's handler would raise within them, where it may
# be swallowed. `cli.run` brings it back. (As `python -m` imports this package, the name of the program is "-m".)
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
