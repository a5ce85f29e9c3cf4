"""Exact fractions as residues: numerator and denominator modulo four primes below 2**16.

Sums and products of any length stay inside uint32. Two fractions are taken as equal if all four residues of the cross
product agree. Equal fractions always agree; different ones only if their cross products differ by a multiple of the
product of the primes (above 2**63).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PRIMES = np.array([65521, 65519, 65497, 65479], np.uint32)


class Fraction(NamedTuple):
    """A fraction by its numerator and denominator modulo each of PRIMES."""

    above: jax.Array  # UInt32[4]
    below: jax.Array  # UInt32[4]


def constant(value: int) -> Fraction:
    """The fraction of a Python integer."""
    return Fraction(
        jnp.asarray(np.array([value % int(p) for p in PRIMES], np.uint32)), jnp.ones(4, jnp.uint32)
    )


def integer(value: jax.Array) -> Fraction:
    """The fraction of an int32, which may be negative."""
    size = jnp.abs(value).astype(jnp.uint32) % PRIMES
    return Fraction(jnp.where(value < 0, (PRIMES - size) % PRIMES, size), jnp.ones(4, jnp.uint32))


def add(a: Fraction, b: Fraction) -> Fraction:
    """a + b."""
    above = a.above * b.below % PRIMES + b.above * a.below % PRIMES
    return Fraction(above % PRIMES, a.below * b.below % PRIMES)


def multiply(a: Fraction, b: Fraction) -> Fraction:
    """a b."""
    return Fraction(a.above * b.above % PRIMES, a.below * b.below % PRIMES)


def divide(a: Fraction, b: Fraction) -> Fraction:
    """a / b, for a `b` that is not zero."""
    return multiply(a, Fraction(b.below, b.above))


def equal(a: Fraction, b: Fraction) -> jax.Array:
    """Bool: whether two fractions are equal."""
    return jnp.all(a.above * b.below % PRIMES == b.above * a.below % PRIMES)


def is_zero(a: Fraction) -> jax.Array:
    """Bool: whether a fraction is zero."""
    return jnp.all(a.above == 0)


def choose(condition: jax.Array, a: Any, b: Any) -> Any:
    """One of two fractions, or of two trees with fractions in them, by a condition."""
    return jax.tree.map(functools.partial(jnp.where, condition), a, b)


def signed(negative: jax.Array, a: Fraction) -> Fraction:
    """The fraction, with its sign changed if `negative`."""
    return Fraction(jnp.where(negative, (PRIMES - a.above) % PRIMES, a.above), a.below)
