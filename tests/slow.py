"""Programs that take long on the device, for tests of what is waited for."""

import time

import jax

__all__ = ["slowed"]


def slowed(program, seconds):
    """The same program, whose results are there so much later; who calls it does not wait."""

    @jax.jit
    def later(tree):
        jax.debug.callback(lambda _: time.sleep(seconds), jax.tree.leaves(tree)[0].reshape(-1)[0])
        return jax.lax.optimization_barrier(tree)  # so that it is a result of this program

    return lambda *args, **options: later(program(*args, **options))
