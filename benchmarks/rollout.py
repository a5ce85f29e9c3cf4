"""How full does a rollout keep the device, and what do isolated policies and barriers cost?

    python -m benchmarks.rollout        # voting, 3 voters, 64 problems x 8 episodes, micro model with random weights

Lengths are imposed: every call ends after 4..64 tokens, drawn from its noise key, so all variants do the same work.
Variants take turns, and a ratio is the median over rounds of the ratio of complete rollout times. Three baselines
finish each turn of all episodes before the next begins: `barrier_static` decodes plain batches of `lanes` calls, one
at a time and each until its longest call ends; `barrier_static_banks` decodes each batch in this engine's banks, side
by side; `barrier_refilled` is this engine itself, which refills and compacts its lanes within the turn.
The last line is one JSON object.
"""

import dataclasses
import itertools
import json
import statistics
import time
import zlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np
from absl import app, flags

from benchmarks import BENCH, MAX_NEW, Unannounced, watch_decoding
from marl_jax.models import init
from marl_jax.models.lora import init_lora
from marl_jax.models.tokenizer import build_micro_tokenizer
from marl_jax.policies import SamplingSettings, isolated, policy_names, shared
from marl_jax.rewards.families import parse
from marl_jax.rollouts import Limits, rollout
from marl_jax.sampling import Completion, Engine, Load, Request, plan
from marl_jax.sampling import engine as sampling_engine
from marl_jax.sampling.engine import Stats
from marl_jax.table import Table
from marl_jax.tasks import Task
from marl_jax.workflows import BUILT_IN, load_prompts

FLAGS = flags.FLAGS
flags.DEFINE_integer("problems", 64, "problems")
flags.DEFINE_integer("samples", 8, "episodes of each problem")
flags.DEFINE_integer("rank", 8, "of the adapters")
flags.DEFINE_integer("lanes", None, "lanes of the engine; by default as planned")
flags.DEFINE_integer("rounds", 3, "measured rounds")
flags.DEFINE_list("variants", None, "only these variants, and the ratios between them")

MAX_PROMPT = 320
Run = Callable[[int], Table]  # step -> the table of its calls


class Ragged:
    """An engine whose every call ends after a length drawn from the call's own noise key."""

    ahead = 1024  # the scheduler's own default

    def __init__(self, engine: Engine):
        self.engine = engine

    @property
    def pending(self) -> int:
        return self.engine.pending

    def submit(self, request: Request) -> int:
        length = 4 + zlib.crc32(repr(request.key).encode()) % (MAX_NEW - 3)
        return self.engine.submit(dataclasses.replace(request, max_new_tokens=length, stop_tokens=()))

    def step(self) -> list[tuple[int, Completion]]:
        return self.engine.step()

    def abandon(self) -> None:
        self.engine.abandon()


class Refilled(Ragged):
    """Turn by turn: no completion is returned before all are finished."""

    ahead = 1 << 30  # all episodes are in one turn

    def step(self) -> list[tuple[int, Completion]]:
        done = []
        while self.engine.pending:
            done += self.engine.step()
        return done


class Static(Ragged):
    """Turn by turn, and batch by batch: a batch is finished before the next begins."""

    ahead = 1 << 30

    def __init__(self, engine: Engine):
        super().__init__(engine)
        self.waiting: list[tuple[int, Request]] = []
        self.tickets = itertools.count()

    @property
    def pending(self) -> int:
        return len(self.waiting)

    def submit(self, request: Request) -> int:
        self.waiting.append((next(self.tickets), request))
        return self.waiting[-1][0]

    def step(self) -> list[tuple[int, Completion]]:
        done, size = [], self.engine.settings.lanes
        for i in range(0, len(self.waiting), size):
            tickets = {super(Static, self).submit(request): t for t, request in self.waiting[i : i + size]}
            while self.engine.pending:
                done += [(tickets[ticket], completion) for ticket, completion in self.engine.step()]
        self.waiting = []
        return done


class StaticBanks(Static):
    """Static batches, each in banks."""


VARIANTS = {
    "shared": ("voting", shared, Ragged),
    "isolated": ("voting", isolated, Ragged),
    "barrier_refilled": ("voting", shared, Refilled),
    "barrier_static": ("voting", shared, Static),
    "barrier_static_banks": ("voting", shared, StaticBanks),
    "shared_3_roles": ("orch_workers", shared, Ragged),
    "isolated_3_roles": ("orch_workers", isolated, Ragged),
}
RATIOS = {  # the first one's time over the second's
    "speedup_over_barrier_static": ("barrier_static", "shared"),
    "speedup_over_barrier_static_banks": ("barrier_static_banks", "shared"),
    "speedup_over_barrier_refilled": ("barrier_refilled", "shared"),
    "isolated_speed_of_shared": ("shared", "isolated"),
    "isolated_speed_of_shared_3_roles": ("shared_3_roles", "isolated_3_roles"),
}


def main(_: list[str]) -> None:
    contenders = {name: contender(*VARIANTS[name]) for name in FLAGS.variants or VARIANTS}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(FLAGS.rounds + 1):  # the first round compiles
        for name, (run, _) in contenders.items():
            start = time.perf_counter()
            run(i)
            if i:
                seconds[name].append(time.perf_counter() - start)
    report: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "episodes": FLAGS.problems * FLAGS.samples,
    }
    for name, (run, stats) in contenders.items():
        report[name] = {"seconds": round(statistics.median(seconds[name]), 3)}
        report[name] |= measure(run, stats, statistics.median(seconds[name]))
    for name, (slow, fast) in RATIOS.items():
        if slow in seconds and fast in seconds:
            pairs = [a / b for a, b in zip(seconds[slow], seconds[fast])]
            report[name] = round(statistics.median(pairs), 3)
    print(json.dumps(report))


def contender(name: str, policies: Callable[..., dict[str, str]], wrap: type[Ragged]) -> tuple[Run, Stats]:
    """A rollout of the workflow on an engine of its own."""
    workflow = BUILT_IN[name]
    policy_map = policies(workflow.roles)
    names = policy_names(policy_map)
    settings = plan(BENCH, Load(MAX_PROMPT, MAX_NEW, min_prompt=8), lanes=FLAGS.lanes)
    if wrap is Static:
        settings = dataclasses.replace(settings, widths=(settings.lanes,), banks=1)
    if wrap is StaticBanks:
        settings = dataclasses.replace(settings, widths=settings.widths[:1])
    adapters = init_lora(1, BENCH, FLAGS.rank, len(names))
    with mock.patch.object(sampling_engine, "Admission", Unannounced):
        engine = Engine(init(0, BENCH), BENCH, settings, adapters=adapters, policies=names)
    tokenizer, rng = build_micro_tokenizer(), np.random.default_rng(0)
    tasks = [
        Task(f"add-{i}", "math", f"{rng.integers(10, 99)}+{rng.integers(10, 99)}=?", "0")
        for i in range(FLAGS.problems)
    ]

    def run(step: int) -> Table:
        return rollout(
            workflow,
            tasks,
            wrap(engine),
            tokenizer,
            policy_map,
            prompts=load_prompts("math_micro"),
            parse=parse,
            samples=FLAGS.samples,
            step=step,
            settings=SamplingSettings(max_new_tokens=MAX_NEW),
            limits=Limits(context=MAX_PROMPT + MAX_NEW),
            ahead=wrap.ahead,
        )

    return run, engine.stats


def measure(run: Run, stats: Stats, seconds: float) -> dict[str, float]:
    """Statistics of one more run, with the share of its time in which no dispatch was running."""
    before = dataclasses.replace(stats)
    start = time.perf_counter()
    with watch_decoding() as decoding:
        table = run(FLAGS.rounds + 1)
        wall = time.perf_counter() - start
    assert table.sound.all(), next(head.error for head in table.bare_episodes if head.error)
    spent = {name: value - getattr(before, name) for name, value in vars(stats).items()}
    prompts = spent["reused_tokens"] + spent["prefilled_tokens"]
    return {
        "useful_tokens_s": round(table.length.sum() / seconds),
        "idle_lane_share": round(1 - spent["sampled_tokens"] / spent["lane_steps"], 3),
        "prefilled_tokens": spent["prefilled_tokens"],
        "prefill_saved_share": round(spent["reused_tokens"] / prompts, 3),
        "host_share": round(1 - decoding.seconds / wall, 3),
    }


if __name__ == "__main__":
    app.run(main)
