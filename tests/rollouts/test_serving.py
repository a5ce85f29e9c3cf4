"""Full, LoRA, frozen and mixed policies, on one base and on several: a map, nothing more."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_engine import TOKENIZER
from micro_engine import CONFIG, RANK, SCALE, SETTINGS, check_logprobs

from marl_jax.models import init
from marl_jax.models.lora import init_lora, merge
from marl_jax.policies import PolicySpec, SamplingSettings, init_policies
from marl_jax.rollouts import rollout
from marl_jax.rollouts.serving import Embedded, Service
from marl_jax.task import Task
from marl_jax.workflows import load_prompts, voting

BASES = {"base": init(jax.random.key(0), CONFIG), "other": init(jax.random.key(1), CONFIG)}
VOTERS = {"generator/0": "a", "generator/1": "b", "generator/2": "c", "aggregator": "b"}

LORA, FULL, FROZEN = PolicySpec(lora=True), PolicySpec(), PolicySpec(frozen=True)
CASES = {
    "full": (FULL, FULL, FULL),
    "lora": (LORA, LORA, LORA),
    "lora and frozen": (LORA, FROZEN, LORA),
    "full and frozen": (FROZEN, FULL, FROZEN),
    "all three": (LORA, FULL, FROZEN),
    "two bases": (LORA, dataclasses.replace(LORA, base="other"), dataclasses.replace(FULL, base="other")),
}


def noisy(tree, seed):
    """Moved somewhere else, as by an update."""
    noise = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: leaf + (0.05 * noise.normal(size=leaf.shape)).astype(leaf.dtype), tree)


def moved(specs, trees, seed):
    return {
        name: tree if specs[name].frozen else noisy(tree, seed + i)
        for i, (name, tree) in enumerate(trees.items())
    }


def fresh_adapter(policy):
    return jax.tree.map(lambda leaf: leaf[0], init_lora(ord(policy), CONFIG, rank=RANK, num_adapters=1))


def whole(spec, tree):
    """The weights that a policy computes with, merged by hand."""
    return merge(BASES[spec.base], tree, SCALE) if spec.lora else tree


def serving(specs, trees, bases=BASES, config=CONFIG):
    return Service(specs, lambda own: Embedded(own, trees, bases, config, SETTINGS, lora_scale=SCALE))


def talk(service):
    table = rollout(
        voting, [Task(f"t{i}", "math", f"{i}+{i}=?") for i in range(2)], service.engines, TOKENIZER, VOTERS,
        prompts=load_prompts("math", "micro"), parse=lambda task, text: None, samples=2,
        settings=SamplingSettings(max_new_tokens=8), versions=service.versions,
    )  # fmt: skip
    return table.episodes()


def check(episodes, specs, trees, version):
    check_logprobs(episodes, {name: whole(specs[name], tree) for name, tree in trees.items()})
    for call in (call for episode in episodes for call in episode.calls):
        assert call.version == (0 if specs[call.policy].frozen else version)


@pytest.mark.parametrize("specs", CASES.values(), ids=list(CASES))
def test_every_policy_answers_with_its_own_weights_before_and_after_an_update(specs):
    specs = dict(zip("abc", specs))
    learned = [name for name, spec in specs.items() if not spec.frozen]
    trees = moved(specs, init_policies(specs, BASES, fresh_adapter), 10)
    service = serving(specs, trees)
    check(talk(service), specs, trees, 0)
    trees = moved(specs, trees, 20)
    service.update(trees, dict.fromkeys(learned, 1))
    check(talk(service), specs, trees, 1)


def test_what_was_learned_is_served_in_the_dtype_of_the_model():
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    bases = {"base": init(0, config)}
    specs = {"a": FULL, "b": FULL, "c": FULL}
    service = serving(specs, init_policies(specs, bases), bases, config)
    served = lambda: {leaf.dtype for leaf in jax.tree.leaves([e._params for e in service.engines.values()])}
    assert served() == {jnp.dtype("bfloat16")}
    before = talk(service)
    service.update(init_policies(specs, bases), dict.fromkeys(specs, 1))
    assert served() == {jnp.dtype("bfloat16")}
    for one, other in zip(before, talk(service)):
        assert [call.tokens for call in one.calls] == [call.tokens for call in other.calls]


def test_an_update_leaves_no_cache_behind_whatever_was_frozen():
    specs = {"a": FULL, "b": FULL, "c": FROZEN}
    trees = init_policies(specs, BASES)
    service = serving(specs, trees)
    talk(service)
    before = {name: service.engines[name].stats.prefilled_tokens for name in specs}
    service.update(trees, {"a": 1, "b": 1})
    talk(service)
    for name in specs:
        assert service.engines[name].stats.prefilled_tokens == 2 * before[name]
