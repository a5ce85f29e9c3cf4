"""The diagnostics of a Gram matrix, against the vectors it was made of."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import close
from learning_rows import TINY, as_table, make_row

from marl_jax.learning.batching import BatchConfig, make_batches
from marl_jax.learning.by_role.gradients import all_cosines, describe, gram_matrix, layer_norms, role_matrix
from marl_jax.learning.network import Qwen3
from marl_jax.models import init

RNG = np.random.default_rng(0)


def gram(*vectors):
    return np.stack(vectors) @ np.stack(vectors).T


@pytest.mark.long
def test_the_gradient_of_a_looked_up_row_is_summed_in_float32_under_bfloat16():
    """A thousand times one token: as the sum, in float64, of tokens that look alike and have a row each."""
    rows, half = 8, 64
    model = dataclasses.replace(TINY, vocab_size=2 * rows * half + 1, dtype="bfloat16")
    params = init(0, dataclasses.replace(model, dtype="float32"))
    params["embed"] = jnp.broadcast_to(params["embed"][:1], params["embed"].shape)
    network, apart = Qwen3(model), 1 + np.arange(2 * rows * half).reshape(rows, -1)

    def gradient(tokens):
        made = (make_row(RNG, prompt, half) for prompt in tokens[:, :half].tolist())
        table = as_table([dataclasses.replace(r, tokens=t) for r, t in zip(made, tokens[:, half:].tolist())])
        batches = make_batches(
            table, ["generator"] * rows, BatchConfig(token_budget=4096, share_prompts=False)
        )
        arrays = [jax.tree.map(jnp.asarray, batch.arrays) for batch in batches]
        noise = [
            jax.random.normal(jax.random.key(1), network.hidden(params, None, one).shape) for one in arrays
        ]
        loss = lambda p: sum(jnp.sum(w * network.hidden(p, None, one)) for w, one in zip(noise, arrays))
        return np.sum(jax.grad(loss)(params)["embed"], axis=0, dtype=np.float64)

    want = gradient(apart)
    assert np.linalg.norm(gradient(np.full_like(apart, 3)) - want) < 1e-4 * np.linalg.norm(want)


def test_gram_matrix_of_trees():
    parts = {"a": RNG.normal(size=(3, 4, 2)), "b": {"c": RNG.normal(size=(3, 5))}, "d": RNG.normal(size=3)}
    flat = np.concatenate([x.reshape(3, -1) for x in jax.tree.leaves(parts)], axis=1)
    got = jax.jit(gram_matrix)(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), parts))
    close(got, flat @ flat.T, of=np.abs(flat) @ np.abs(flat).T)


def test_describe_by_hand():
    found = describe(gram([3.0, 0.0], [0.0, 4.0], [-1.0, 0.0]), ["a", "b", "c"])
    assert found["norm"] == {"a": 3.0, "b": 4.0, "c": 1.0}
    assert found["share"] == {"a": 3 / 8, "b": 4 / 8, "c": 1 / 8}
    assert found["resultant"] == pytest.approx(20**0.5)
    assert found["coherence"] == pytest.approx(20**0.5 / 8)
    assert found["dominance"] == 0.5
    assert found["effective"] == pytest.approx(
        np.exp(-(3 * np.log(3 / 8) + 4 * np.log(0.5) + np.log(1 / 8)) / 8)
    )
    assert found["cosine"] == {("a", "b"): 0.0, ("a", "c"): -1.0, ("b", "c"): 0.0}
    assert found["conflict_rate"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_identical_slots_amplify_n_times_and_opposed_ones_not_at_all(n):
    g = RNG.normal(size=50)
    assert describe(gram(*[g] * n), list(range(n)))["amplification"] == pytest.approx(n)
    if n % 2 == 0:
        assert describe(gram(*[g, -g] * (n // 2)), list(range(n)))["amplification"] == pytest.approx(
            0, abs=1e-6
        )


def test_independent_slots_amplify_by_the_root_of_n():
    n, dims = 9, 20_000
    found = describe(gram(*RNG.normal(size=(n, dims))), list(range(n)))
    assert found["amplification"] == pytest.approx(3.0, rel=0.02)
    assert found["coherence"] == pytest.approx(1 / 3, rel=0.02)


def test_ratios_do_not_depend_on_the_size_of_gradients():
    vectors = RNG.normal(size=(3, 20))
    large, small = (describe(gram(*(vectors * size)), ["a", "b", "c"]) for size in (1.0, 1e-3))
    for name in ("coherence", "amplification", "dominance", "effective", "conflict_rate", "cosine", "share"):
        assert small[name] == pytest.approx(large[name]), name


@pytest.mark.parametrize("still", [0, 1])
def test_a_part_without_a_gradient_has_no_cosine_and_amplifies_nothing(still):
    vectors = [np.array([1.0, 2.0]), np.array([2.0, 1.0])]
    vectors[still] = np.zeros(2)
    found = describe(gram(*vectors), ["a", "b"])
    assert found["cosine"] == {} and found["conflict_rate"] is None
    assert found["amplification"] == pytest.approx(1) and found["dominance"] == 1
    assert found["effective"] == pytest.approx(1)


def test_no_gradient_has_no_ratios():
    found = describe(np.zeros((2, 2)), ["a", "b"])
    assert found["norm"] == {"a": 0.0, "b": 0.0} and found["share"] == {"a": None, "b": None}
    assert [found[k] for k in ("coherence", "amplification", "dominance", "effective", "conflict_rate")] == [
        None
    ] * 5


def test_there_is_no_cosine_between_policies():
    described = {"p0": describe(gram([1.0, 0.0], [1.0, 1.0]), ["a", "b"]), "p1": describe(gram([1.0]), ["c"])}
    found = all_cosines(described, {"a": "p0", "b": "p0", "c": "p1"})
    assert found == {("a", "b"): pytest.approx(0.5**0.5), ("a", "c"): None, ("b", "c"): None}


def test_roles_are_sums_of_their_slots():
    slots = RNG.normal(size=(3, 7))
    member = role_matrix(["a", "a", "b"], ["a", "b"])
    by_role = member @ gram(*slots) @ member.T
    np.testing.assert_allclose(by_role, gram(slots[0] + slots[1], slots[2]))


def test_layer_norms_split_the_norm():
    full = {"embed": jnp.ones((2, 3, 4)), "layers": {"q": jnp.ones((2, 5, 4)), "k": jnp.ones((2, 5))}}
    norms = layer_norms(full)
    assert set(norms) == {"embed", *(f"layers/{i}" for i in range(5))}
    np.testing.assert_allclose(norms["layers/3"], [5**0.5] * 2)
    total = sum(n**2 for n in norms.values())
    np.testing.assert_allclose(total, jnp.diagonal(gram_matrix(full)))
    adapters = {"q": {"a": jnp.ones((2, 5, 4, 3)), "b": jnp.ones((2, 5, 3, 4))}}
    np.testing.assert_allclose(layer_norms(adapters)["layers/0"], [24**0.5] * 2)


def test_a_role_of_several_policies_is_compared_in_each():
    described = {
        "p0": describe(gram([1.0, 0.0], [1.0, 1.0]), ["writer", "judge"]),
        "p1": describe(gram([1.0]), ["writer"]),
    }
    roles = {"writer/0": "p0", "writer/1": "p0", "writer/2": "p1", "judge": "p0"}
    assert all_cosines(described, roles) == {
        ("writer/0", "writer/2"): None,
        ("writer/0", "judge"): pytest.approx(0.5**0.5),
        ("writer/2", "judge"): None,
    }
