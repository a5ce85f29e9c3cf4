"""Bytes that a traced program holds at the same time, counted equation by equation; nothing is compiled.

    x = f(a)   y = g(x)   z = h(y, a)        live behind each: x | y | z: an array goes with its last use

What a compiler writes into whatever reads it (broadcasts, counters) counts nothing, and a result may take the place
of an operand that goes. A loop holds what it carries once, and the most that one turn of it makes besides.
"""

import math
from collections.abc import Iterator, Sequence, Set
from typing import Any

from jax.extend import core

FUSED = ("broadcast_in_dim", "iota")
APART = ("dot_general", "sort", "gather", "concatenate")  # these cannot write where they read
LOOPS = ("while", "scan")


def arrays_bytes(variables: Sequence[Any]) -> int:
    """Bytes of the arrays that these variables of a program stand for."""
    return sum(map(_size, variables))


def count_equations(program: core.Jaxpr) -> int:
    """Of a traced program, those of its loops and branches among them."""
    return sum(1 + sum(count_equations(inner) for inner, _ in _inner(eqn, set())) for eqn in program.eqns)


def made_bytes(program: core.Jaxpr, given: Set[Any] = frozenset()) -> int:
    """Bytes of what a program makes, its results among them, where most of it is live.

    Those arrays that it is `given` go with their last use, too.
    """
    last = {var: number for number, eqn in enumerate(program.eqns) for var in _variables(eqn.invars)}
    results = {*_variables(program.outvars)}
    written, live, most = set(given), 0, 0  # what counts in `live`, or is `given`
    for number, eqn in enumerate(program.eqns):
        name = eqn.primitive.name
        going = {v for v in _variables(eqn.invars) if last[v] == number and v in written and v not in results}
        new = [] if name in FUSED else eqn.outvars
        made, freed = arrays_bytes(new), arrays_bytes([*going])
        inside = max((made_bytes(inner, own) for inner, own in _inner(eqn, going)), default=0)
        if name in LOOPS:
            now = made + inside - min(freed, made)
        elif inside:
            now = max(inside, made - freed)
        else:
            now = made - (0 if name in APART else min(freed, made))
        most = max(most, live + now)
        written |= {*new}
        live += made - freed - arrays_bytes([v for v in new if v not in last and v not in results])
    return most


def _inner(eqn: Any, going: set[Any]) -> Iterator[tuple[core.Jaxpr, set[Any]]]:
    """The programs inside of an equation, each with what it is given that goes with its last use there."""
    name, params = eqn.primitive.name, eqn.params
    for key, value in params.items():
        for one in value if isinstance(value, tuple | list) else (value,):
            inner: Any = getattr(one, "jaxpr", one)
            if not hasattr(inner, "eqns"):
                continue
            own: set[Any] = set()
            if name == "scan":
                own = {*inner.invars[_carried(params)]}
            elif key == "body_jaxpr":
                own = {*inner.invars[params["body_nconsts"] :]}
            elif name not in LOOPS:
                outer = eqn.invars[len(eqn.invars) - len(inner.invars) :]  # a switch has its index in front
                pairs = [(m, v) for m, v in zip(inner.invars, outer) if not isinstance(v, core.Literal)]
                own = {mine for mine, var in pairs if var in going}
            yield inner, own


def _carried(params: dict[str, Any]) -> slice:
    """The operands that a scan carries: behind its constants, before what it goes through."""
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
