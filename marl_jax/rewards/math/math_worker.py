"""The process in which algebra is compared, one pair per line.

It loads math-verify once and forks a child for every pair, so a comparison that runs away, eats memory or crashes
ends alone and leaves no trace in the next one. The child's exit status is the verdict, printed with the CPU seconds
that it took. A child that used up its CPU time means no. A child that was ended by its wall time or a signal, or that
could not set its limits (exit 2), gives no verdict (?):

    parent --[tree, tree, cpu_s, wall_s]--> worker --fork--> child: verify(a, b)
    parent <--"1", "0" or "?", seconds----- worker <--exit 0, 1, 2 or a signal--
"""

import gc
import json
import logging
import os
import resource
import signal
import sys
from typing import Any

MEMORY_LIMIT = 1 << 30
# Constants are computed to this many digits plus twice those of their longest number; all but ten must agree.
DIGITS = 50

FORBIDDEN = (  # prefixes of audit events
    *("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill", "os.remove", "os.rename"),
    *("os.mkdir", "os.rmdir", "subprocess.", "socket.", "ctypes.", "shutil.", "pty."),
)

SYMPY = {  # our names of functions -> sympy's, if they differ
    **{"+": "Add", "*": "Mul", "!": "factorial", "!!": "factorial2", "abs": "Abs", "ceil": "ceiling"},
    **{"ln": "log", "max": "Max", "min": "Min", "binom": "binomial"},
    **{f"arc{name}": f"a{name}" for name in ("sin", "cos", "tan", "sec", "csc")},
    **{f"arc{name}h": f"a{name}h" for name in ("sin", "cos", "tan", "cot", "sec", "csc")},
}
X, TWO = ["v", "x0"], ["n", "2/1"]
WARM_UP = (  # the first comparisons load half of the library
    (["^", ["+", X, TWO], TWO], ["+", ["^", X, TWO], ["*", TWO, X], ["*", TWO, X], ["^", TWO, TWO]]),
    (["+", ["^", ["f", "sin", X], TWO], ["^", ["f", "cos", X], TWO]], ["n", "1/1"]),
    (["^", TWO, ["n", "-1/2"]], ["f", "cos", ["*", ["n", "1/4"], ["c", "pi"]]]),
)


def equal(answer: list, gold: list) -> bool:
    """Whether two trees of `expressions`, in the form in which they are sent, are equal."""
    import sympy
    from math_verify import verify
    from sympy.functions.elementary.hyperbolic import HyperbolicFunction
    from sympy.functions.elementary.trigonometric import TrigonometricFunction

    a, b = _build(answer), _build(gold)
    if not a.free_symbols and not b.free_symbols:  # simplification may fail to prove constants equal
        digits = DIGITS + 2 * max(_longest(answer), _longest(gold))
        difference, size = (a - b).evalf(digits), abs(a.evalf())
        if difference.is_number and abs(difference) < sympy.Integer(10) ** (10 - digits) * max(1, size):
            return True
    # As a difference, because `verify` compares two sides by their text alone if one of them is a lone symbol.
    difference = a - b
    if difference.has(sympy.log) and _vanishes_apart(difference):
        return True
    if verify([sympy.Integer(0)], [difference], timeout_seconds=None):
        return True
    if difference.has(TrigonometricFunction, HyperbolicFunction) and _vanishes(difference):
        return True
    if all(power.exp.is_Integer or not power.base.free_symbols for power in difference.atoms(sympy.Pow)):
        return False
    return sympy.factor(difference, deep=True) == 0  # the root of x^2 + 2x + 1 is |x + 1|


def _vanishes_apart(difference: Any) -> bool:
    """Whether a difference is zero with logarithms of products as sums: ln|x^2 - 1| is ln|x - 1| + ln|x + 1|.

    That may be another branch of the logarithm, which values at negative points have refuted by then.
    """
    import sympy
    from sympy.simplify.fu import TR1, TR2

    arguments = [logarithm.args[0] for logarithm in difference.atoms(sympy.log)]
    if not all(each.free_symbols or each.is_positive for each in arguments):  # sympy may search forever
        return False
    factored = sympy.factor(TR2(TR1(difference)), deep=True)  # in sines and cosines
    split = factored.replace(sympy.Abs, lambda part: sympy.Mul(*map(abs, sympy.Mul.make_args(part))))
    return sympy.expand(sympy.expand_log(split, force=True)) == 0


def _vanishes(difference: Any) -> bool:
    """Whether a difference is zero when its functions of angles are written as exponentials."""
    import sympy

    return sympy.cancel(sympy.expand(sympy.together(difference.rewrite(sympy.exp)))) == 0


def main() -> None:
    """Answer pairs of trees, one per line, until the input ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull, "w") as devnull:
        os.dup2(devnull.fileno(), 1)  # prints of libraries must not look like verdicts
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    logging.disable(logging.CRITICAL)
    gc.disable()  # loaded modules stay
    for pair in WARM_UP:
        equal(*pair)
    gc.freeze()
    gc.enable()
    out.write("ready\n")
    for line in sys.stdin:
        verdict, cpu_s = _in_child(*json.loads(line))
        out.write(f"{verdict} {cpu_s:.4f}\n")


def _in_child(answer: list, gold: list, cpu_s: float, wall_s: float) -> tuple[str, float]:
    child = os.fork()
    if child:
        _, status, used = os.wait4(child, 0)
        verdict = {0: "1", 1: "0", -signal.SIGPROF: "0"}.get(os.waitstatus_to_exitcode(status), "?")
        return verdict, used.ru_utime + used.ru_stime
    code = 2  # no verdict
    try:
        _limit(cpu_s, wall_s)
        code = 1
        code = 0 if equal(answer, gold) else 1
    finally:
        os._exit(code)


def _limit(cpu_s: float, wall_s: float) -> None:
    """Bound the child's resources; the timers' default action ends it, even inside a C function."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)
    if sys.platform == "linux":  # a Mac refuses what is less than its shared libraries take
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.addaudithook(_refuse)


def _refuse(event: str, args: tuple) -> None:
    """A second barrier: algebra starts no process, opens no socket and changes no file."""
    if event.startswith(FORBIDDEN) or (event == "open" and args[1] and set(str(args[1])) & set("wax+")):
        os._exit(1)


def _build(tree: list):
    """A tree as a sympy expression, node by node: no text is parsed."""
    import sympy

    kind, *parts = tree
    if kind == "n":
        return sympy.Rational(*(int(part, 16) for part in parts[0].split("/")))
    if kind == "c":
        return {"pi": sympy.pi, "e": sympy.E, "i": sympy.I}[parts[0]]
    if kind == "v":
        return sympy.Symbol(parts[0], real=True)
    name, parts = (parts[0], parts[1:]) if kind == "f" else (kind, parts)
    values = [_build(part) for part in parts]
    if name == "^":
        return _power(*values)
    if name == "log":
        return sympy.log(values[1], values[0])
    return getattr(sympy, SYMPY.get(name, name))(*values)


def _longest(tree: list) -> int:
    """At least the hexadecimal digits of the longest number in a tree."""
    return max((_longest(part) if isinstance(part, list) else len(part) for part in tree), default=0)


def _power(base, exponent):
    """The power; an odd root of a negative number is the real one, as in `expressions`: x^{2/3} is |x|^{2/3}."""
    if exponent.is_Rational and not exponent.is_Integer and exponent.q % 2:
        if base.is_negative:
            return (-1) ** (exponent.p % 2) * (-base) ** exponent
        if exponent.p % 2 == 0 and base.free_symbols and base.is_real:
            return abs(base) ** exponent
    return base**exponent


if __name__ == "__main__":
    main()
