"""A long run grows nothing: not its memory, not its open files, not the number of compiled programs."""

import dataclasses
import io
import os
from pathlib import Path

import jax
import pytest
from tiny_run import make_base, packed, tiny_config

from marl_jax.config.run_config import CheckpointConfig, EngineConfig, LogConfig
from marl_jax.learning import BatchConfig
from marl_jax.policies import SamplingSettings
from marl_jax.runs import loop
from marl_jax.terminal.live import Live

MIB = 1 << 20


class Watch(Live):
    """Notes what the process holds after every step."""

    def __init__(self, steps):
        super().__init__(steps, ("generator", "aggregator"), io.StringIO())
        self.memory, self.files, self.compiled = [], [], []
        self._compilations = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, name, seconds, **about):
        self._compilations += name == "/jax/core/compile/backend_compile_duration"

    def step(self, step, metrics):
        super().step(step, metrics)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.memory.append(pages * os.sysconf("SC_PAGE_SIZE"))
        self.files.append(len(os.listdir("/proc/self/fd")))
        self.compiled.append(self._compilations)


def watch(tmp_path, change=lambda config: config, **changes):
    config = change(tiny_config(make_base(tmp_path / "base"), **changes))
    seen = Watch(config.steps)
    loop.train(config, tmp_path / "run", live=seen)
    return seen


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.long
def test_after_its_first_steps_a_run_compiles_nothing_and_opens_nothing(tmp_path):
    seen = watch(tmp_path, steps=16)
    assert seen.compiled[-1] == seen.compiled[5]  # the evaluation of step 4 and all checkpoints among them
    # A save under way has files open for a while; a leak of one for each step would be 8 more at the end.
    assert min(seen.files[-4:]) <= min(seen.files[:8]) + 2


@pytest.mark.campaign
def test_five_hundred_steps_stay_flat(tmp_path):
    # As many saves as by default: each leaves something that tensorstore does not free (see the build notes).
    seen = watch(tmp_path, packed, steps=500, checkpoints=CheckpointConfig())
    settled, last = seen.memory[50], max(seen.memory[-20:])
    print(f"memory {settled / MIB:.0f} MiB after 50 steps, {last / MIB:.0f} MiB after 500")
    assert last < settled + 32 * MIB
    assert min(seen.files[-20:]) <= min(seen.files[:50]) + 2
    assert seen.compiled[-1] == seen.compiled[100]


@pytest.mark.campaign
def test_five_hundred_steps_of_64_x_8_episodes_stay_under_a_gigabyte(tmp_path):
    """Without checkpoints, whose number does not grow; every call is as long as it may be, 256 tokens."""
    plain = tiny_config("any")
    steps, every = 3, LogConfig().episodes_every
    watch(
        tmp_path,
        data=dataclasses.replace(plain.data, problems=64, train_size=256, val_size=64),
        rollout=dataclasses.replace(plain.rollout, samples=8),
        sampling=SamplingSettings(max_new_tokens=256),
        engine=EngineConfig(max_prompt=72, lanes=256),
        learner=dataclasses.replace(
            plain.learner, batch=BatchConfig(buckets=(512,), token_budget=4096, share_prompts=False)
        ),
        evaluation=dataclasses.replace(plain.evaluation, problems=64, every=1),
        logging=LogConfig(episodes_every=1),
        steps=steps,
    )
    run = tmp_path / "run"
    episodes = size_of(run / "episodes") / steps
    rest = (size_of(run) - size_of(run / "checkpoints") - size_of(run / "episodes")) / steps
    print(f"episodes of a step {episodes / MIB:.2f} MiB, everything else {rest / 1024:.1f} KiB per step")
    assert 500 / every * episodes + 500 * rest < 1e9
