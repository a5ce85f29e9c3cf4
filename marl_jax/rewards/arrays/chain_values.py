"""Values of a program of the chain language: a number or a short list at each test, and the operations on it.

`apply` runs one operation on one value. A value is `failed` if Python would raise, and `strange` if it does not fit in
the arrays (an integer beyond 2**30, a list repeated).
"""

import flax.struct
import jax
import jax.numpy as jnp

LARGEST = 2**30


@flax.struct.dataclass
class Value:
    """The value at one test."""

    is_list: jax.Array  # Bool
    number: jax.Array  # Int32, if it is a number
    items: jax.Array  # Int32[L], zeros after the last
    size: jax.Array  # Int32
    failed: jax.Array  # Bool
    strange: jax.Array  # Bool


def same(a: Value, b: Value) -> jax.Array:
    """Whether two values are equal in Python, and neither is failed or strange."""
    sound = ~(a.failed | a.strange | b.failed | b.strange)
    lists = (a.size == b.size) & jnp.all(a.items == b.items)
    return sound & (a.is_list == b.is_list) & jnp.where(a.is_list, lists, a.number == b.number)


def apply(is_op: dict[str, jax.Array], c: jax.Array, d: jax.Array, value: Value) -> Value:
    """The value after an operation with constants c and d; see `chain_programs` for how each is written."""
    x, items, size = value.number, value.items, value.size
    place = jnp.arange(len(items))
    inside = place < size
    safe_c = jnp.where(c == 0, 1, c)
    of_number = {
        "add": x + c,
        "subtract": x - c,
        "times": x * c,
        "modulo": x % safe_c,
        "floor": x // safe_c,
        "least": jnp.maximum(x, c),
        "most": jnp.minimum(x, c),
        "negate": -x,
        "square": x * x,
        "absolute": jnp.abs(x),
    }
    of_list = {
        "sum": jnp.sum(jnp.where(inside, items, 0)),
        "count": size,
        "largest": jnp.where(size > 0, jnp.max(jnp.where(inside, items, -(2**31))), 0),
        "smallest": jnp.where(size > 0, jnp.min(jnp.where(inside, items, 2**31 - 1)), 0),
    }
    filters = {
        "above": inside & (items > c),
        "below": inside & (items < c),
        "remainder": inside & (items % safe_c == d),
        "first": inside & (place < c),
        "drop": inside & (place >= c),
    }
    changes = {
        "add each": items + c,
        "subtract each": items - c,
        "times each": items * c,
        "sort": jnp.sort(jnp.where(inside, items, 2**31 - 1)),
        "reverse": items[jnp.clip(size - 1 - place, 0, len(items) - 1)],
    }
    number, kept = _choose(is_op, x, of_number | of_list), _choose(is_op, inside, filters)
    changed = _choose(is_op, items, changes)
    on_number, reduces = (jnp.any(jnp.stack([is_op[name] for name in ops])) for ops in (of_number, of_list))

    mistyped = ~is_op["none"] & (on_number == value.is_list)
    repeated = is_op["times"] & value.is_list
    divided = is_op["modulo"] | is_op["floor"] | (is_op["remainder"] & (size > 0))
    failed = (mistyped & ~repeated) | (divided & (c == 0))
    large = (
        (is_op["times"] & _too_large(x, c))
        | (is_op["square"] & _too_large(x, x))
        | (is_op["times each"] & jnp.any(inside & _too_large(items, c)))
        | (is_op["sum"] & (jnp.sum(jnp.abs(jnp.where(inside, items, 0).astype(jnp.float32))) > LARGEST))
    )
    target = jnp.where(kept, jnp.cumsum(kept) - 1, len(items))
    moved = (target[None] == place[:, None]) & kept[None]  # [to, from]
    changed = jnp.sum(jnp.where(moved, changed[None], 0), axis=1)
    large |= jnp.any(jnp.abs(changed) > LARGEST) | (~value.is_list & (jnp.abs(number) > LARGEST))
    sound = ~(value.failed | value.strange)
    return Value(
        is_list=value.is_list & ~reduces,
        number=number,
        items=changed,
        size=jnp.sum(kept),
        failed=value.failed | (sound & failed),
        strange=value.strange | (sound & ~failed & (repeated | large)),
    )


def _choose(is_op: dict[str, jax.Array], otherwise: jax.Array, results: dict[str, jax.Array]) -> jax.Array:
    for name, result in results.items():
        otherwise = jnp.where(is_op[name], result, otherwise)
    return otherwise


def _too_large(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.abs(a.astype(jnp.float32) * b.astype(jnp.float32)) > LARGEST
