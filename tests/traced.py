"""Programs as JAX traces them."""

import jax


def equations(function, *given):
    """All of a program, those inside of scans and checkpoints included."""
    return list(_within(jax.make_jaxpr(function)(*given).jaxpr))


def _within(program):
    for equation in program.eqns:
        yield equation
        for value in equation.params.values():
            for one in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(one, "jaxpr", one)
                if hasattr(inner, "eqns"):
                    yield from _within(inner)


def all_highest(function, *given, more_than=5):
    """Whether every product asks for full precision, of both factors; there are more than so many."""
    found = [
        one.params["precision"] for one in equations(function, *given) if one.primitive.name == "dot_general"
    ]
    return len(found) > more_than and set(found) == {(jax.lax.Precision.HIGHEST,) * 2}
