"""Runs whose rollouts are those of a vLLM server, and what its answers are held against."""

import dataclasses
import io

import jax
import numpy as np
from tiny_run import tiny_config

from marl_jax.config.run_config import (
    CheckpointConfig,
    EngineConfig,
    EvaluationConfig,
    RolloutConfig,
    VllmConfig,
)
from marl_jax.models import forward
from marl_jax.runs import loop
from marl_jax.runs.loading.play import make_service, planned_engine
from marl_jax.sampling.requests import Request
from marl_jax.terminal.live import Live

PROMPT = (5, 6, 7)


def config_of(base, url, **changes):
    plain = tiny_config(base)
    changes = {
        "policies": dataclasses.replace(plain.policies, train="lora", lora_rank=4),
        "engine": EngineConfig("vllm", VllmConfig(url, timeout=20.0), max_prompt=72, lanes=8),
        "evaluation": EvaluationConfig(every=0),
        "checkpoints": CheckpointConfig(best=False),
        "data": dataclasses.replace(plain.data, problems=2),
        "rollout": RolloutConfig(samples=2),
        "steps": 2,
        **changes,
    }
    return dataclasses.replace(plain, **changes)


def in_full(config, **changes):
    """One policy for all roles, of which all is trained."""
    shared = {"map": dict.fromkeys(config.roles, "p0"), "train": "full", **changes}
    return dataclasses.replace(config, policies=dataclasses.replace(config.policies, **shared))


def train(config, workdir):
    said = io.StringIO()
    step = loop.train(config, workdir, live=Live(config.steps, config.roles, said))
    return step, said.getvalue()


def moved(trees, seed):
    noise = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: leaf + 0.1 * noise.normal(size=leaf.shape).astype(leaf.dtype), trees)


def service_of(config, parts, trees):
    return make_service(config, parts, trees, planned_engine(config, parts, training=False))


def answers(service, policies, count=3, prompt=PROMPT, **changes):
    """{policy: its completions, one per key}, of the same prompt and keys for each."""
    request = Request(prompt, (0,), 8, **changes)
    asked = {
        policy: [
            service.engines[policy].submit(dataclasses.replace(request, key=(n,), policy=policy))
            for n in range(count)
        ]
        for policy in policies
    }
    found = {}
    for engine in set(service.engines.values()):
        while engine.pending:
            found |= {(id(engine), ticket): one for ticket, one in engine.step()}
    return {
        policy: [found[id(service.engines[policy]), ticket] for ticket in tickets]
        for policy, tickets in asked.items()
    }


def check(found, weights, model, temperature=1.0, prompt=PROMPT, atol=1e-4):
    """Log-probs are those of these weights on the tokens that came."""
    for completion in found:
        tokens = np.array([[*prompt, *completion.tokens]])
        logp = jax.nn.log_softmax(forward(weights, model, tokens)[0] / temperature)
        ours = np.asarray(logp)[len(prompt) - 1 + np.arange(len(completion.tokens)), completion.tokens]
        np.testing.assert_allclose(completion.logprobs, ours, atol=atol)
