"""A long run grows nothing: not its memory, not its open files, not the number of compiled programs."""

import io
import os
from pathlib import Path

import jax
import pytest
from tiny_run import make_base, tiny_config

from marl_jax.runs import loop
from marl_jax.runs.live import Live

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


def watch(tmp_path, steps):
    base = make_base(tmp_path / "base")
    seen = Watch(steps)
    loop.train(tiny_config(base, steps=steps), tmp_path / "run", live=seen)
    size = sum(path.stat().st_size for path in (tmp_path / "run").rglob("*") if path.is_file())
    return seen, size


def test_after_its_first_steps_a_run_compiles_nothing_and_opens_nothing(tmp_path):
    seen, _ = watch(tmp_path, 24)
    assert seen.compiled[-1] == seen.compiled[11]  # packed batches have met all of their shapes
    # A save under way has files open for a while; a leak of one for each step would be 12 more at the end.
    assert min(seen.files[-6:]) <= min(seen.files[:12]) + 2


@pytest.mark.campaign
def test_five_hundred_steps_stay_flat(tmp_path):
    seen, size = watch(tmp_path, 500)
    settled, last = seen.memory[50], max(seen.memory[-20:])
    print(
        f"memory {settled / MIB:.0f} MiB after 50 steps, {last / MIB:.0f} MiB after 500; folder {size / MIB:.1f} MiB"
    )
    assert last < settled + 32 * MIB
    assert min(seen.files[-20:]) <= min(seen.files[:50]) + 2
    assert seen.compiled[-1] == seen.compiled[100]
