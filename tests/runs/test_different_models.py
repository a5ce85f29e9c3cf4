"""Policies on models of different shapes and tokenizers: one run, each role in the tokens of its own policy."""

import dataclasses
import io
import json
import math
import signal

import jax
import numpy as np
import pytest
from run_kit import in_a_process, same
from tiny_run import MODEL, OTHER, differing, other_base, tiny_config

from marl_jax.commands.contenders import Evaluation
from marl_jax.commands.evaluate import evaluate
from marl_jax.commands.export import export
from marl_jax.compiled.refusal import NoArrayForm
from marl_jax.config.phase_fields import Phase
from marl_jax.config.run_config import ConfigError, load_config
from marl_jax.models import init, load_hf
from marl_jax.models.lora import init_lora
from marl_jax.models.tokenizer import load_tokenizer
from marl_jax.planning import memory
from marl_jax.planning.devices import Device
from marl_jax.planning.plan import PlanError, check_fits, find_models, make_plan
from marl_jax.rollouts import read_episodes
from marl_jax.rollouts.history import Chat
from marl_jax.rollouts.storage import read_extra
from marl_jax.run_folder.folder import FolderError, digest_tokenizer
from marl_jax.runs import loop
from marl_jax.runs.loading.parts import PartsError, model_configs
from marl_jax.runs.loading.play import settled_shapes
from marl_jax.terminal.live import Live

pytestmark = pytest.mark.long

HERE = Device("CPU", "cpu", 8 << 30, 20e9, 5e10, 5e10)


def train(config, workdir):
    return loop.train(config, workdir, live=Live(config.steps, config.roles, io.StringIO()))


@pytest.fixture(scope="module")
def config(base):
    return differing(tiny_config(base))


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("differing") / "run"
    assert train(config, workdir) == 3
    return workdir


def changed(config, **changes):
    return dataclasses.replace(config, policies=dataclasses.replace(config.policies, **changes))


def test_killed_it_ends_like_one_that_never_was(base, config, whole, tmp_path):
    status, said, _ = in_a_process(base, tmp_path / "run", "--kind=differing", "--at=step", "--visit=3")
    assert status == -signal.SIGKILL, said[-2000:]
    assert train(config, tmp_path / "run") == 3
    same(tmp_path / "run", whole, kind="differing")


def test_every_policy_has_learned(whole, config):
    first, *_, last = (json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines())
    for policy in ("p0", "p1"):
        assert last[f"policy/{policy}/updates"] == 3
        assert first[f"policy/{policy}/update_norm"] > 0
    # Sampler and trainer agree in each policy, the adapter off and on: ratio 1 within float error.
    for line in (first, last):
        assert line["role/generator/gap_max"] < 1e-4 and line["role/evaluator/gap_max"] < 1e-4


def test_rows_are_tokens_of_the_tokenizer_of_their_policy(whole, config, base):
    path = whole / "episodes" / "step-000001.parquet"
    table, extra = read_episodes(path), read_extra(path)
    tokenizers = {"p0": load_tokenizer(base), "p1": load_tokenizer(other_base(base))}
    opening = {"p0": "<|im_start|>user\n", "p1": "<turn>u:"}
    later = 0
    for row, (policy, after) in enumerate(zip(table.policy.tolist(), table.after.tolist())):
        policy = table.policies[policy]
        tokenizer, prompt = tokenizers[policy], table.prompt[row].tolist()
        assert tokenizer.decode(prompt).startswith(opening[policy])
        assert tokenizer.decode(table.tokens[row].tolist(), skip_special_tokens=True) == table.text[row]
        if "\ufffd" not in table.text[row]:  # bytes that are no character
            assert extra["ends"][row][-1] == len(table.text[row])
        if after >= 0:
            last = row - int(table.call[row]) + after
            history = [*table.prompt[last].tolist(), *table.tokens[last].tolist()]
            assert prompt[: len(history)] == history and table.policies[table.policy[last]] == policy
            later += 1
        for read in (
            place for place in table.reads[row].tolist() if place >= 0
        ):  # what was said passes as text
            said = table.text[row - int(table.call[row]) + read].strip()
            # A spelling may lack characters of the other's, which one token stands for there.
            known = said if said.isascii() and said.isalnum() else ""
            assert known in extra["asked"][row]
    assert later > 0


def test_a_resumed_or_evaluated_run_has_the_shapes_of_each_model(whole, config, base):
    settled = json.loads((whole / "config.json").read_text())["settled"]
    assert set(settled_shapes(settled, config)) == {str(base), other_base(base)}
    digests = json.loads((whole / "config.json").read_text())["digests"]
    for directory in (str(base), other_base(base)):
        assert digests[f"tokenizer {directory}"] == digest_tokenizer(directory)
        assert f"base {directory}" in digests


def test_each_policy_leaves_with_its_own_tokenizer(whole, base, tmp_path):
    for policy, directory, model in (("p0", base, MODEL), ("p1", other_base(base), OTHER)):
        export(whole, policy, tmp_path / policy, dtype="float32")
        config, params = load_hf(tmp_path / policy)
        assert Chat(load_tokenizer(directory, model)).end_of_turn in config.stop_tokens
        assert config == dataclasses.replace(model, dtype="float32", eos_token_id=config.eos_token_id)
        assert digest_tokenizer(tmp_path / policy) == digest_tokenizer(directory)
        moved = jax.tree.map(lambda a, b: np.any(np.asarray(a) != b), params, load_hf(directory)[1])
        assert any(jax.tree.leaves(moved))
    export(whole, "p1", tmp_path / "adapter", format="peft")
    assert digest_tokenizer(tmp_path / "adapter") == digest_tokenizer(other_base(base))
    with pytest.raises(FolderError, match="trained in all its weights, so there is no adapter"):
        export(whole, "p0", tmp_path / "none", format="peft")


def test_evaluations_of_each_mode_but_swapped(whole, tmp_path):
    asked = {"split": "val", "problems": 2}
    base, last = evaluate(whole, Evaluation(**asked), out=tmp_path / "trained")
    assert (base["mode"], last["mode"], last["step"]) == ("base", "trained", 3)
    alone = Evaluation(**asked, mode="single_transfer", role="evaluator")
    _, last = evaluate(
        whole, alone, out=tmp_path / "alone"
    )  # the adapter of the other base, as a single agent
    assert (last["mode"], last["role"]) == ("single_transfer", "evaluator")
    with pytest.raises(
        FolderError, match="swapped needs policies of one shape and tokenizer: 'p1' has another shape"
    ):
        evaluate(whole, Evaluation(**asked, mode="swapped"), out=tmp_path / "swapped")


def test_the_plan_counts_each_model_with_its_own_shape(config):
    models, source = find_models(config)
    assert models == {"p0": MODEL, "p1": OTHER} and "-other" in source
    plan = make_plan(config, models, HERE)
    size = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    weights = {policy: size(init(0, model)) for policy, model in models.items()}
    adapter = size(init_lora(0, OTHER, 2, 1))
    of = {part.name: part.bytes for part in plan.parts if part.phase == "always"}
    assert of["base weights"] == sum(weights.values())
    assert of["trained weights (float32)"] == weights["p0"] and of["adapters (float32)"] == adapter
    # An engine of float32 takes the trained weights as they are, and an adapter once more.
    assert of["weights served to the sampler"] == adapter
    assert plan.engines == 2 and set(plan.shapes) == {config.policies.base, config.policies.bases["p1"]}
    caches = 0
    for directory, model in zip(plan.shapes, (MODEL, OTHER)):
        shapes = plan.shapes[directory]
        numbers = model.num_hidden_layers * 2 * model.num_key_value_heads * model.head_dim
        caches += sum(map(math.prod, shapes.caches)) * numbers * 4
    assert of["caches of the lanes"] == caches
    with pytest.raises(PlanError, match="the run needs"):
        check_fits(config, models, dataclasses.replace(HERE, memory=plan.total - 1), plan.shapes)


def test_engines_of_different_models_share_the_memory_by_what_a_lane_takes(config):
    free = dataclasses.replace(config, engine=dataclasses.replace(config.engine, lanes=None))
    models, _ = find_models(free)
    for room in (64 << 20, 1 << 30):
        plan = make_plan(free, models, dataclasses.replace(HERE, memory=room))
        lanes = [shapes.lanes for shapes in plan.each_shape]
        assert max(lanes) <= 2 * min(lanes)  # they are rounded to powers of two
        rooms = [memory.memory_bytes(model, shapes) for model, shapes in zip((MODEL, OTHER), plan.each_shape)]
        assert sum(rooms) <= room // 2


def test_what_does_not_go_together_is_told_in_one_line(config, tmp_path):
    def told(kind, match, function, *args):
        with pytest.raises(kind, match=match) as refusal:
            function(*args)
        assert "\n" not in str(refusal.value)

    copied = dataclasses.replace(config, phases=(Phase(3, copies={"p0": "p1"}),))
    told(PartsError, "copies 'p1' to 'p0', which has weights of another form", model_configs, copied)
    compiled = dataclasses.replace(
        changed(config, trains={}, train="full"), road="compiled", rewards=type(config.rewards)(),
        learner=dataclasses.replace(config.learner, interventions=type(config.learner.interventions)()),
    )  # fmt: skip
    told(NoArrayForm, r"differ in shape, tokenizer .*road=hosted", train, compiled, tmp_path / "compiled")
    stops = lambda role: dataclasses.replace(
        config, role_sampling={role: {"stop_tokens": (MODEL.vocab_size,)}}
    )
    models, _ = find_models(config)
    told(PlanError, f"tokens are 0..{MODEL.vocab_size - 1}", make_plan, stops("generator"), models, HERE)
    make_plan(stops("evaluator"), models, HERE)  # whose model has more


@pytest.mark.parametrize(
    ("bases", "message"),
    [
        ({"generator": "x"}, "names 'generator', but takes policies, not roles: give policies.bases.p0"),
        (
            {"generator": "x", "aggregator": "y"},
            "gives 'aggregator' and 'generator' different values, but in policies.map they share the policy 'p0'",
        ),
        ({"p7": "x"}, "policies.bases names 'p7', which is no policy of policies.map"),
    ],
)
def test_a_base_is_of_a_policy(bases, message):
    with pytest.raises(ConfigError, match=message):
        load_config("configs/micro.py:voting-shared-xs-math", [("policies.bases", json.dumps(bases))])


def test_a_history_is_not_continued_in_another_tokenizer(config, tmp_path):
    """The tokens of one policy mean something else to the other."""
    shared = dataclasses.replace(
        config, workflow=dataclasses.replace(config.workflow, settings={"rounds": 2, "shared": True}), steps=1
    )
    with pytest.raises(Exception, match=r"continues the history of .* has another tokenizer"):
        train(shared, tmp_path / "run")
