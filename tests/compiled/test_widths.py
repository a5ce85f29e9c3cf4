"""Static widths give what a computation of each row alone gives."""

import jax
import jax.numpy as jnp

from marl_jax.compiled.widths import by_width, in_blocks, ladder

LENGTHS = jnp.array([3, 0, 17, 33, 1, 0, 40, 16, 5])
VALUES = jnp.arange(9 * 40).reshape(9, 40)


def total(rows, width):
    """The sum of the first `length` values of each row, of what a block of that width sees."""
    length = LENGTHS.at[rows].get(mode="fill", fill_value=0)
    values = VALUES.at[rows].get(mode="fill", fill_value=0)[:, :width]
    sums = jnp.sum(jnp.where(jnp.arange(width) < length[:, None], values, 0), axis=1)
    return sums, jnp.full(len(rows), width)


def test_rows_are_computed_in_the_narrowest_block_that_holds_them():
    sums, widths = jax.jit(lambda: in_blocks(LENGTHS, 2, (16, 32, 40), total, None))()
    wanted = [int(VALUES[i, :n].sum()) for i, n in enumerate(LENGTHS.tolist())]
    assert sums.tolist() == wanted
    # By length: 0 0 | 1 3 | 5 16 | 17 33 | 40; nobody needs the first block.
    assert widths.tolist() == [16, 0, 40, 40, 16, 0, 40, 16, 16]


def test_a_switch_takes_the_smallest_width_that_is_enough():
    of = lambda need: by_width(need, (4, 8, 16), jnp.int32, None)
    assert [int(of(jnp.int32(need))) for need in (0, 4, 5, 8, 9, 16)] == [4, 4, 8, 8, 16, 16]


def test_seeds_side_by_side_take_one_width():
    of = jax.vmap(lambda need: by_width(need, (4, 8, 16), jnp.int32, "seeds"), axis_name="seeds")
    assert of(jnp.array([2, 7, 3])).tolist() == [8, 8, 8]
    assert "cond[" in str(jax.make_jaxpr(of)(jnp.array([2, 7, 3])))  # one branch runs


def test_a_ladder_is_half_of_the_longest_and_the_longest():
    assert ladder(288) == (144, 288)
    assert ladder(63) == (32, 63)
    assert ladder(10) == (8, 10)
    assert ladder(8) == (8,)
