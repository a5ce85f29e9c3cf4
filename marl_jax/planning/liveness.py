"""Bytes that a traced program holds at the same time, counted equation by equation; nothing is compiled.

    x = f(a)   y = g(x)   z = h(y, a)        live after each: x | y | z: an array is freed after its last use

Arrays that a compiler fuses into their readers (broadcasts, counters) count nothing, and a result may take the place
of an operand that is freed. A loop counts its carry once, and the most that one turn of it makes besides.
"""

import math
from collections.abc import Iterator, Sequence, Set
from typing import Any

from jax.extend import core

FUSED = ("broadcast_in_dim", "iota")
NOT_IN_PLACE = ("dot_general", "sort", "gather", "concatenate")  # no result takes an operand's place
LOOPS = ("while", "scan")


def arrays_bytes(variables: Sequence[Any]) -> int:
    """Bytes of the arrays of these variables of a program."""
    return sum(map(_size, variables))


def count_equations(program: core.Jaxpr) -> int:
    """The number of equations of a traced program, with those of its loops and branches."""
    return sum(1 + sum(count_equations(inner) for inner, _ in _inner(eqn, set())) for eqn in program.eqns)


def made_bytes(program: core.Jaxpr, given: Set[Any] = frozenset()) -> int:
    """The most bytes of arrays that a program makes, its results among them, and that are live at the same time.

    The arrays in `given` are freed after their last use, too.
    """
    last = {var: number for number, eqn in enumerate(program.eqns) for var in _variables(eqn.invars)}
    results = {*_variables(program.outvars)}
    written, live, most = set(given), 0, 0  # variables that `live` counts, or that are `given`
    for number, eqn in enumerate(program.eqns):
        name = eqn.primitive.name
        dying = {v for v in _variables(eqn.invars) if last[v] == number and v in written and v not in results}
        new = [] if name in FUSED else eqn.outvars
        made, freed = arrays_bytes(new), arrays_bytes([*dying])
        inside = max((made_bytes(inner, inputs) for inner, inputs in _inner(eqn, dying)), default=0)
        if name in LOOPS:
            now = made + inside - min(freed, made)
        elif inside:
            now = max(inside, made - freed)
        else:
            now = made - (0 if name in NOT_IN_PLACE else min(freed, made))
        most = max(most, live + now)
        written |= {*new}
        live += made - freed - arrays_bytes([v for v in new if v not in last and v not in results])
    return most


def _inner(eqn: Any, dying: set[Any]) -> Iterator[tuple[core.Jaxpr, set[Any]]]:
    """The programs inside of an equation, each with its inputs that are freed after their last use there."""
    name, params = eqn.primitive.name, eqn.params
    for key, value in params.items():
        for program in value if isinstance(value, tuple | list) else (value,):
            inner: Any = getattr(program, "jaxpr", program)
            if not hasattr(inner, "eqns"):
                continue
            freed: set[Any] = set()
            if name == "scan":
                freed = {*inner.invars[_carried(params)]}
            elif key == "body_jaxpr":
                freed = {*inner.invars[params["body_nconsts"] :]}
            elif name not in LOOPS:
                outer = eqn.invars[len(eqn.invars) - len(inner.invars) :]  # a switch has its index in front
                pairs = [(m, v) for m, v in zip(inner.invars, outer) if not isinstance(v, core.Literal)]
                freed = {inside for inside, var in pairs if var in dying}
            yield inner, freed


def _carried(params: dict[str, Any]) -> slice:
    """The operands that a scan carries: after its constants, before the arrays that it scans."""
    if "num_consts" in params:  # before JAX 0.11
        constants, carry = params["num_consts"], params["num_carry"]
    else:
        constants, carry = (len(part) for part in params["ft_in"].unpack()[:2])
    return slice(constants, constants + carry)


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def _size(variable: Any) -> int:
    kind = variable.aval
    return math.prod(kind.shape) * kind.dtype.itemsize if hasattr(kind, "shape") else 0
