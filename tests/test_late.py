"""Rooms load what is heavy when it is first asked for."""

import subprocess
import sys

import pytest

from marl_jax import learning, rewards, rollouts, runs, sampling

HEAVY = ("pyarrow", "marl_jax.sampling.engine", "marl_jax.learning.update", "marl_jax.runs.loop")


def test_a_configuration_is_read_without_what_only_a_run_needs():
    script = "import sys, marl_jax.config.run_config; print(*sys.modules, sep='\\n')"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "marl_jax.config.run_config" in loaded
    assert not {*HEAVY} & {*loaded}


@pytest.mark.parametrize("room", [learning, rewards, rollouts, runs, sampling])
def test_every_name_of_a_room_is_there_and_others_are_told(room):
    for name in room.__all__:
        assert getattr(room, name) is not None
    with pytest.raises(AttributeError, match=f"module '{room.__name__}' has no attribute 'nothing'"):
        getattr(room, "nothing")  # noqa: B009
