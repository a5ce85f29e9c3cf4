"""How fast is one complete GRPO update: on CPU next to a plain torch step, on a GPU against its peak?

    python -m benchmarks.update                    # micro model: 64 prompts of 64 tokens x 8 samples of 64
    python -m benchmarks.update --shape=0.6b --prompts=4 --prompt=1024 --completion=1024       # on a GPU; or 1.7b

Prints one JSON object on the last line. Tokens are those of the padded rectangle of all rows, for every contender;
ratios are medians over rounds in which the contenders take turns. `mfu` = operations of the matrix products that the
tokens need (a shared prompt counts once; padding, recomputation and causally masked pairs do not count) / time / the
device's peak. `mfu_unmasked` counts attention without the mask, as the usual 6 N + 12 L H Q T per token does.
`cost_of_a_live_token_if_ragged` is the cost with completions of 4 tokens up to all, over that with full ones.
"""

import dataclasses
import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import BENCH
from benchmarks.torch_step import Step, torch_step
from marl_jax.learning.batching import BatchConfig, padding_share
from marl_jax.learning.learner_config import LearnerConfig
from marl_jax.learning.network import Qwen3
from marl_jax.learning.optimiser import OptimiserConfig, ScheduleConfig
from marl_jax.learning.update import Learner
from marl_jax.models import ModelConfig, init
from marl_jax.models.weight_table import num_parameters
from marl_jax.planning.costs import Model
from marl_jax.planning.devices import here
from marl_jax.table import Table

FLAGS = flags.FLAGS
flags.DEFINE_string(
    "shape", "bench", "bench (0.8M parameters) or a preset of ModelConfig, computed in bfloat16"
)
flags.DEFINE_integer("prompts", 64, "different prompts")
flags.DEFINE_integer("samples", 8, "rows of each prompt")
flags.DEFINE_integer("prompt", 64, "tokens of a prompt")
flags.DEFINE_integer("completion", 64, "sampled tokens of each row")
flags.DEFINE_integer("token_budget", 16384, "tokens of a micro-batch")
flags.DEFINE_string("remat", None, "none, dots or layer; by default none for bench, dots for presets")
flags.DEFINE_integer("rounds", 5, "measured rounds")
flags.DEFINE_bool("torch", True, "run the plain torch step beside it (CPU and bench only)")
flags.DEFINE_bool(
    "diagnostics", True, "measure what gradients by role cost; needs memory for one more gradient"
)


def main(_: list[str]) -> None:
    micro = FLAGS.shape == "bench"
    model = BENCH if micro else dataclasses.replace(ModelConfig.preset(FLAGS.shape), dtype="bfloat16")
    rows = make_rows(model, FLAGS.prompts, FLAGS.samples, FLAGS.prompt, FLAGS.completion)
    tokens = len(rows) * (FLAGS.prompt + FLAGS.completion)
    params = init(0, dataclasses.replace(model, dtype="float32"))
    state: dict[str, Any] = {"policies": {"p0": jax.tree.map(jnp.copy, params)}}
    one_role = rows.replace(role=np.zeros_like(rows.role), roles=("generator",))
    contenders = {
        "update": our_step(model, state, one_role, "off", share=True),
        "without_sharing": our_step(model, state, one_role, "off", share=False),
        "ragged": our_step(model, state, ragged(one_role), "off", share=True),
    }
    if FLAGS.diagnostics:
        contenders["two_roles_off"] = our_step(model, state, rows, "off", share=True)
        contenders["two_roles"] = our_step(model, state, rows, "roles", share=True)
    if FLAGS.torch and micro and jax.default_backend() == "cpu":
        contenders["torch"], _ = torch_step(model, params, one_role)
    contenders["update"]()
    used = jax.devices()[0].memory_stats()  # None on CPU
    taken = take_turns(contenders, FLAGS.rounds)
    for name, times in taken.items():
        typical = statistics.median(times)
        print(f"{name:16s} {typical:8.3f} s   {tokens / typical:10,.0f} tokens/s")
    batches = Learner(Qwen3(model), config_of("off", share=True), {"generator": "p0"})._batches(one_role)
    device = here()
    peak = device.bfloat16 if model.dtype == "bfloat16" else device.float32
    report: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "parameters": num_parameters(model),
        "tokens": tokens,
        "tokens_computed": sum(batch.size for batch in batches),
        "padding_share": round(padding_share(batches), 4),
        "gain_from_shared_prompts": paired(taken, "without_sharing", "update"),
        "cost_of_a_live_token_if_ragged": round(
            paired(taken, "ragged", "update") * live(one_role) / live(ragged(one_role)), 3
        ),
    }
    if FLAGS.diagnostics:
        report["diagnostics_overhead"] = round(paired(taken, "two_roles", "two_roles_off") - 1, 4)
    for name, shared in (("update", True), ("without_sharing", False)):
        typical = statistics.median(taken[name])
        report[f"{name}_tokens_s"] = round(tokens / typical)
        if peak:
            report[f"{name}_mfu"] = round(operations(model, shared) / typical / peak, 3)
    if peak:
        usual = operations(model, shared=False, masked=False)
        report["without_sharing_mfu_unmasked"] = round(
            usual / statistics.median(taken["without_sharing"]) / peak, 3
        )
    if used:
        report["peak_memory_gb"] = round(used["peak_bytes_in_use"] / 1e9, 2)
    if "torch" in taken:
        report["torch_tokens_s"] = round(tokens / statistics.median(taken["torch"]))
        report["speedup"] = paired(taken, "torch", "update")
        # Without sharing, prompts are computed as often as by torch.
        report["speedup_of_equal_work"] = paired(taken, "torch", "without_sharing")
    print(json.dumps(report))


def make_rows(model: ModelConfig, prompts: int, samples: int, prompt: int, completion: int) -> Table:
    """Random rows of two roles, each with half of the prompts, since roles have prompts of their own."""
    rng = np.random.default_rng(0)
    tasks = np.repeat(np.arange(prompts), samples)
    questions = rng.integers(1, model.vocab_size, (prompts, prompt)).tolist()
    return Table.make(
        role=[("generator", "aggregator")[task % 2] for task in tasks],
        policy=["p0"] * len(tasks),
        prompt=[questions[task] for task in tasks],
        tokens=rng.integers(1, model.vocab_size, (len(tasks), completion)),
        logprobs=rng.normal(-5, 0.1, (len(tasks), completion)),
        task=tasks,
        advantage=rng.normal(size=len(tasks)),
    )


def ragged(rows: Table) -> Table:
    """The rows with completions of 4 tokens up to all."""
    longest = int(rows.length.max())
    lengths = np.random.default_rng(1).integers(min(4, longest), longest + 1, len(rows))
    cut = {
        name: [getattr(rows, name)[row][:size] for row, size in enumerate(lengths)]
        for name in ("tokens", "logprobs")
    }
    return Table.make(
        role=[rows.role_of(row) for row in range(len(rows))],
        policy=["p0"] * len(rows),
        prompt=[rows.prompt[row] for row in range(len(rows))],
        task=rows.task,
        advantage=rows.advantage,
        **cut,
    )


def live(rows: Table) -> int:
    """Tokens that are read if each prompt counts once; the last token of a row is predicted, never read."""
    return FLAGS.prompts * FLAGS.prompt + int((rows.length - 1).sum())


def our_step(model: ModelConfig, state: dict[str, Any], rows: Table, level: Any, *, share: bool) -> Step:
    """A step of the learner on the policy in `state`; contenders share it, because a large one fits only once."""
    remat = FLAGS.remat or ("none" if FLAGS.shape == "bench" else "dots")
    learner = Learner(Qwen3(model, remat=remat), config_of(level, share), dict.fromkeys(rows.roles, "p0"))
    state.setdefault("learner", learner.init(state["policies"]))

    def step() -> None:
        state["policies"], state["learner"], _ = learner.step(state["policies"], state["learner"], rows)
        jax.block_until_ready(state["policies"])

    return step


def config_of(level: Any, share: bool) -> LearnerConfig:
    return LearnerConfig(
        optimiser=OptimiserConfig("adamw", ScheduleConfig(1e-4)),
        batch=BatchConfig(token_budget=FLAGS.token_budget, share_prompts=share),
        gradients=level,
    )


def operations(model: ModelConfig, shared: bool, masked: bool = True) -> float:
    """Multiplications and additions of the matrix products of one update, forward and twice that backward."""
    sizes, rows = Model(model), FLAGS.prompts * FLAGS.samples
    prompt, branch = FLAGS.prompt, FLAGS.completion - 1  # the last token is predicted, never read
    assert masked or not shared, "a tree is not what the usual formula counts"
    times = FLAGS.prompts if shared else rows  # the number of prompts that are computed
    tokens = times * prompt + rows * branch
    if masked:
        pairs = times * prompt * (prompt + 1) / 2 + rows * branch * (prompt + (branch + 1) / 2)
    else:  # as if every token attended to its complete row
        pairs = rows * (prompt + branch) ** 2
    layers = model.num_hidden_layers * (tokens * sizes.layer + 2 * pairs * sizes.heads)
    return 6.0 * (layers + rows * FLAGS.completion * sizes.head)


def take_turns(contenders: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender in each round, after one that is not measured."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(rounds + 1):
        for name, step in contenders.items():
            begin = time.perf_counter()
            step()
            if i:
                taken[name].append(time.perf_counter() - begin)
    return taken


def paired(taken: dict[str, list[float]], a: str, b: str) -> float:
    """Median over rounds of the time of `a` over that of `b`."""
    return round(statistics.median(x / y for x, y in zip(taken[a], taken[b])), 4)


if __name__ == "__main__":
    app.run(main)
