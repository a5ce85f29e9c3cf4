"""Runs on a real vLLM server of this processor; `make vllm` installs one and names its interpreter in VLLM_PYTHON."""

import dataclasses
import itertools
import os
import signal
import socket
import urllib.request
from pathlib import Path

import jax
import numpy as np
import pyarrow.parquet as parquet
import pytest
from run_kit import records
from tiny_run import tiny_config
from vllm_kit import answers, check, config_of, in_full, moved, service_of, train

from marl_jax.config.run_config import CheckpointConfig, EngineConfig, LogConfig, RolloutConfig, VllmConfig
from marl_jax.learning import BatchConfig, OptimiserConfig, ScheduleConfig
from marl_jax.models import forward
from marl_jax.models.lora import merge
from marl_jax.policies import SamplingSettings
from marl_jax.rollouts.vllm.started import ServerRequirements, Started
from marl_jax.rollouts.vllm.wire import Server
from marl_jax.rollouts.voices import EngineGone
from marl_jax.run_folder.checkpoints import restore, steps
from marl_jax.runs.loading.parts import load_parts
from marl_jax.runs.loading.play import make_service, planned_engine

pytestmark = pytest.mark.vllm

BASE = Path(__file__).parents[2] / "configs" / "bases" / "micro-xs"
CALLS = 4 * 4 * 3  # of a step; the checks before the first are 2
SERVER = VllmConfig(
    start=True,
    python=os.environ.get("VLLM_PYTHON", "VLLM_PYTHON is not set: run make vllm"),
    flags="--enforce-eager",
    environment={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"},
    timeout=120.0,
)


def kill(started):
    """The server and its children, not what keeps it."""
    keeper = started._keeper.pid
    (server,) = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    os.killpg(int(server), signal.SIGKILL)


def serving(needed, folder):
    """A server that is not the run's own, at an address that it keeps."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    one = Started(dataclasses.replace(SERVER, url=url), needed, folder / "log")
    assert one.start() == url
    yield one, VllmConfig(url, timeout=120.0)
    one.end()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    yield from serving(ServerRequirements(str(BASE), "float32", 512, 2, 4), tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def full_server(tmp_path_factory):
    yield from serving(
        ServerRequirements(str(BASE), "float32", 512, 0, 0, True), tmp_path_factory.mktemp("full")
    )


def real_config(chosen, **changes):
    """Three steps of two adapters."""
    plain = tiny_config(BASE)
    learner = dataclasses.replace(
        plain.learner,
        optimiser=OptimiserConfig(schedule=ScheduleConfig(3e-3)),
        batch=BatchConfig(buckets=(256,), token_budget=256, share_prompts=False),
    )
    return config_of(
        BASE,
        "",
        policies=dataclasses.replace(plain.policies, train="lora", lora_rank=4, dtype="float32"),
        engine=EngineConfig("vllm", chosen, max_prompt=200, lanes=16),
        sampling=SamplingSettings(max_new_tokens=24),
        data=dataclasses.replace(plain.data, problems=4),
        rollout=RolloutConfig(samples=4),
        learner=learner,
        checkpoints=CheckpointConfig(every=1, latest=3, best=False),
        logging=LogConfig(episodes_every=1, episodes_problems=4),
        steps=3,
        **changes,
    )


def test_greedy_tokens_are_those_of_the_embedded_engine_and_log_probs_those_of_the_trainer(server):
    config = real_config(server[1])
    parts = load_parts(config)
    trees = moved(parts.start(0), 1)
    real = service_of(config, parts, trees)
    embedded = dataclasses.replace(config, engine=EngineConfig(max_prompt=200, lanes=16))
    own = make_service(embedded, parts, trees, planned_engine(embedded, parts), measured=True)
    root = parts.bases[str(BASE)]
    for seed in range(6):
        prompt = tuple(np.random.default_rng(seed).integers(3, 160, 12).tolist())
        theirs = answers(real, trees, 1, prompt, temperature=0.0)
        ours = answers(own, trees, 1, prompt, temperature=0.0)
        drawn = answers(real, trees, 3, prompt, temperature=0.7)
        for policy, tree in trees.items():
            (their,), (our,) = theirs[policy], ours[policy]
            assert their.tokens == our.tokens and their.finish_reason == our.finish_reason
            check(drawn[policy], merge(root, tree, parts.lora_scale), parts.model, 0.7, prompt, atol=1e-3)
            assert len({tuple(one.tokens) for one in drawn[policy]}) > 1


def test_full_weights_answer_from_the_update_on_also_where_the_prompt_was_cached_before(full_server):
    config = in_full(real_config(full_server[1]))
    parts = load_parts(config)
    assert parts.model.tie_word_embeddings
    real = service_of(config, parts, parts.start(0))
    embedded = dataclasses.replace(config, engine=EngineConfig(max_prompt=200, lanes=16))
    prompts = [tuple(np.random.default_rng(seed).integers(3, 160, 180).tolist()) for seed in range(4)]
    before = [answers(real, ["p0"], 1, prompt, temperature=0.0) for prompt in prompts]
    for update in (1, 2):
        trees = moved(parts.start(0), update)  # the embedding as well, which is the head
        real.update(trees, {"p0": update})
        own = make_service(embedded, parts, trees, planned_engine(embedded, parts), measured=True)
        hits = prefix_hits(full_server[1].url)
        after = [answers(real, ["p0"], 1, prompt, temperature=0.0) for prompt in prompts]
        assert prefix_hits(full_server[1].url) == hits  # of the weights before
        assert after != before
        for prompt, found in zip(prompts, after):
            assert [one.tokens for one in found["p0"]] == [
                one.tokens for one in answers(own, ["p0"], 1, prompt, temperature=0.0)["p0"]
            ]
            drawn = answers(real, ["p0"], 3, prompt, temperature=0.7)["p0"]
            check(drawn, trees["p0"], parts.model, 0.7, prompt, atol=1e-3)
            assert len({tuple(one.tokens) for one in drawn}) > 1
        assert prefix_hits(full_server[1].url) > hits  # of these
        before = after


@pytest.mark.parametrize("of", ["adapters", "full weights"])
def test_three_steps_raise_the_log_probs_of_what_was_better_than_its_group(of, request, tmp_path):
    config = asking(request, of)[1]
    reached, _ = train(config, tmp_path / "run")
    assert reached == 3
    lines, _ = records(tmp_path / "run")
    for role in config.roles:
        assert max(line[f"role/{role}/gap_max"] for line in lines) < 1e-3
    parts = load_parts(config)
    for step in (1, 2, 3):
        rows = parquet.read_table(tmp_path / "run" / "episodes" / f"step-{step:06}.parquet").to_pylist()
        after, _ = restore(tmp_path / "run" / "checkpoints", step, {"policies": parts.start(0)})
        for policy, tree in after["policies"].items():
            full = not parts.specs[policy].lora
            merged = tree if full else merge(parts.bases[str(BASE)], tree, parts.lora_scale)
            mine = [row for row in rows if row["policy"] == policy]
            assert len(mine) >= 16 and any(row["advantage"] for row in mine)
            gains = [
                row["advantage"] * (_logprobs(merged, parts.model, row) - row["logprobs"]).mean()
                for row in mine
            ]
            assert np.mean(gains) > 0, (step, policy)


@pytest.mark.parametrize("of", ["adapters", "full weights"])
def test_a_server_that_is_killed_in_the_middle_of_a_step_costs_that_step_alone(
    of, request, tmp_path, monkeypatch
):
    started, config = asking(request, of)
    with monkeypatch.context() as patched:
        kill_in_the_second_step(patched, lambda: kill(started))
        with pytest.raises(EngineGone, match=r"cannot be reached .*the same command goes on after step 1"):
            train(config, tmp_path / "run")
    assert steps(tmp_path / "run" / "checkpoints") == [1]
    started.start()
    all_steps_are_there(config, tmp_path / "run")


@pytest.mark.parametrize("of", ["adapters", "full weights"])
def test_a_run_starts_its_server_and_again_when_it_is_killed_in_the_middle_of_a_step(
    of, tmp_path, monkeypatch
):
    begun, start = [], Started.start
    monkeypatch.setattr(Started, "start", lambda self: (begun.append(self), start(self))[1])
    kill_in_the_second_step(monkeypatch, lambda: kill(begun[-1]))
    config = real_config(SERVER)
    all_steps_are_there(in_full(config) if of == "full weights" else config, tmp_path / "run")
    assert len(begun) == 2 and begun[0]._keeper is None


def asking(request, of):
    """A server of the user's, and a run that asks it."""
    if of == "adapters":
        started, chosen = request.getfixturevalue("server")
        return started, real_config(chosen)
    started, chosen = request.getfixturevalue("full_server")
    return started, in_full(real_config(chosen))


def prefix_hits(url):
    """How many tokens of prompts the server has had in its cache."""
    with urllib.request.urlopen(f"{url}/metrics") as told:
        lines = told.read().decode().splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total")
    )


def kill_in_the_second_step(patched, end):
    asked, complete = itertools.count(1), Server.complete

    def killed(self, *args):
        if next(asked) == 2 + CALLS + 10:
            end()
        return complete(self, *args)

    patched.setattr(Server, "complete", killed)


def all_steps_are_there(config, workdir):
    reached, _ = train(config, workdir)
    lines, _ = records(workdir)
    assert reached == 3 and [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["calls"] == CALLS for line in lines)
    # The sampler had the weights that the trainer has.
    assert max(line["role/generator/gap_max"] for line in lines) < 1e-3


def _logprobs(weights, model, row):
    """Of the sampled tokens of a row, under these weights."""
    tokens = np.zeros((1, 256), np.int32)
    both = [*row["prompt"], *row["tokens"]]
    tokens[0, : len(both)] = both
    logp = np.asarray(jax.nn.log_softmax(_forward(weights, model, tokens)[0]))
    return logp[np.arange(len(row["prompt"]), len(both)) - 1, row["tokens"]]


_forward = jax.jit(forward, static_argnums=1)
