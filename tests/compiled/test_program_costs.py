"""What the benchmark counts of a compiled program, beside a count by hand."""

import jax
import jax.numpy as jnp

from benchmarks.program_costs import count_loops, program_costs


def loops(a, b):
    """Seven products, and one more as often as a condition asks for it."""
    a, _ = jax.lax.scan(lambda a, _: (jnp.sin(a @ b), None), a, None, length=7)
    return jax.lax.while_loop(lambda a: a.sum() < 1e9, lambda a: a @ b + 1, a)


def test_products_are_counted_as_often_as_their_loops_run():
    a, b = jnp.ones((8, 16)), jnp.ones((16, 16))
    text = jax.jit(loops).lower(a, b).compile().as_text()
    costs = program_costs(text, rounds=5)
    assert costs.operations == (7 + 5) * 2 * 8 * 16 * 16
    assert 12 * 2 <= costs.kernels < 12 * 8  # a product and what is behind it
    assert costs.bytes > 12 * 4 * (2 * 8 * 16 + 16 * 16)
    assert program_costs(text, rounds=6).operations - costs.operations == 2 * 8 * 16 * 16


def test_of_a_switch_the_longest_branch_counts():
    of = lambda size: lambda x: x.at[:size, :size].set(x[:size, :size] @ x[:size, :size])
    step = lambda which, x: jax.lax.switch(which, [of(4), of(8)], x)
    text = jax.jit(step).lower(jnp.int32(0), jnp.ones((8, 8))).compile().as_text()
    assert program_costs(text, rounds=1).operations == 2 * 8**3


def test_a_loop_in_a_named_scope_runs_as_often_as_is_said():
    def step(a, b):
        with jax.named_scope("packs"):
            a = jax.lax.while_loop(lambda a: a.sum() < 1e9, lambda a: a @ b, a)
        return jax.lax.while_loop(lambda a: a.sum() < 1e9, lambda a: a @ b, a)

    text = jax.jit(step).lower(jnp.ones((8, 16)), jnp.ones((16, 16))).compile().as_text()
    assert program_costs(text, 5, {"packs": 3}).operations == (5 + 3) * 2 * 8 * 16 * 16
    assert count_loops(text, "packs") == 1
    text = (
        jax.jit(jax.vmap(step, (0, None))).lower(jnp.ones((2, 8, 16)), jnp.ones((16, 16))).compile().as_text()
    )
    assert count_loops(text, "packs") == 1
