"""Programs that try to break out, cheat or wreck, each with what it tries and how that must end.

An `Attack` is imported in the sandbox, and its function `attack(facts)` is called with all that a real attacker would
have to find out: paths, ports, process ids. It either returns `answer`, which it only can when every attempt was
refused, or its verdict's reason matches `fails`, the expected value being a secret it cannot know. Whatever it does,
`World.harm` looks from outside.
"""

import dataclasses

PRELUDE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

def blocked(act, *args, **kwargs):
    try:
        act(*args, **kwargs)
    except OSError:
        return "blocked"
    return "DONE"

def refused(act, *args):
    try:
        act(*args)
    except PermissionError:
        return "blocked"
    return "DONE"

def raw(number, *args):
    # Refused by the filter: a complaint about arguments would mean that the kernel had looked at them.
    if libc.syscall(number, *args) == -1 and ctypes.get_errno() in (1, 38):
        raise OSError(ctypes.get_errno(), "")

def frame(data):
    return len(data).to_bytes(4, "big") + data

GUESS = frame(b'["ok","guess"]')
"""


@dataclasses.dataclass(frozen=True)
class Attack:
    """One hostile program."""

    name: str
    tries: str
    source: str
    answer: object = "blocked"
    fails: str | None = None  # a regular expression for the verdict's reason; `answer` is then not looked at
    check: str | None = None  # test code instead of a call
    script: bool = False  # run as a script, its output judged
    seconds: float = 6.0

    @property
    def program(self) -> str:
        """The whole source."""
        return PRELUDE + self.source


def expression(name: str, tries: str, expression: str, **more) -> Attack:
    """An attack of one expression over `facts`."""
    return Attack(name, tries, f"def attack(facts):\n    return {expression}\n", **more)
