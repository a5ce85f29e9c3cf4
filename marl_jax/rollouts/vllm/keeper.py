"""Runs a command as long as the caller lives: `python keeper.py COMMAND...`, with a pipe of the caller as its input.

The pipe closes when the caller ends, even by SIGKILL. Then the command and its children are ended. Nothing but the
standard library is imported.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys

LOOK_S, GRACE_S = 0.2, 10.0


def main(command: list[str]) -> int:
    """Run the command; returns its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # its caller decides when it ends
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN, not inherited by the command
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    while child.poll() is None and not select.select([sys.stdin], [], [], LOOK_S)[0]:
        pass
    _signal(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(GRACE_S)
    _signal(child.pid, signal.SIGKILL)  # also ends children that it left
    code = child.wait()
    return code if code >= 0 else 128 - code


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
