"""The console command: `marl-jax COMMAND ...` is `python -m experiments.COMMAND ...`, from any folder.

marl-jax train --config=micro:voting-isolated-s-math --workdir=runs/voting
marl-jax COMMAND --helpshort
"""

import contextlib
import errno
import functools
import io
import os
import runpy
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from marl_jax.fields import nearest
from marl_jax.packaged import packaged

COMMANDS = [
    "list",
    "docs",
    "try",
    "new",
    "train",
    "evaluate",
    "report",
    "plan",
    "matrix",
    "export",
    "collect",
    "pretrain",
    "demo",
]
REFUSED = 2


def main() -> int | None:
    """Run the script of the named command, which imports what it needs."""
    make_output_safe()
    name, *_ = [*sys.argv[1:], "--help"]
    if name in ("--help", "-h", "--helpshort", "help"):
        with early_close_allowed():
            print(_help())
        return None
    if name not in COMMANDS:
        print(f"'{name}' is no command{nearest(name, COMMANDS)}", file=sys.stderr)
        return REFUSED
    file = _file(name)
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does, for the user's workflows, tasks and rewards
    sys.argv[1:2] = []
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # as in experiments/__init__.py
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    runpy.run_path(str(file), run_name="__main__")
    return None


def make_output_safe() -> None:
    """Replace characters that a terminal cannot show by question marks, and closed streams by the null device."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


@contextlib.contextmanager
def early_close_allowed() -> Iterator[None]:
    """A context in which the output may be closed early without an error, as in `docs | head`.

    If it goes to a file on a full disk, the command ends with a message of one line.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # so that errors are raised here, not when the interpreter ends
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not (full or isinstance(error, BrokenPipeError)):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if full:
            sys.exit(f"the output cannot be written ({error.strerror}): make room on its disk")


def print_to_stderr(text: str) -> None:
    """Print a line on standard error, which may be closed or broken."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _help() -> str:
    from marl_jax.commands.pages import first_words

    fill = functools.partial(textwrap.fill, width=80, subsequent_indent=" " * 12)
    lines = [fill(f"  {name:<10}{first_words(_file(name))}") for name in COMMANDS]
    return "\n".join(
        ["marl-jax COMMAND ...", "", *lines, "", "marl-jax COMMAND --helpshort says what there is to set."]
    )


def _file(name: str) -> Path:
    return packaged("experiments") / f"{name}.py"
