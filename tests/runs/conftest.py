"""A base model and a run of it, made once for all tests of the room that take one."""

import pytest
from run_kit import run
from tiny_run import make_base

from marl_jax.rewards.math import equivalence


@pytest.fixture(scope="session", autouse=True)
def patient():
    """What an answer earns, and whether it could be graded, does not depend on how busy the machine is."""
    before, equivalence.WALL_LIMIT_S = equivalence.WALL_LIMIT_S, 60.0
    yield
    equivalence.WALL_LIMIT_S = before


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="session")
def whole(base, tmp_path_factory):
    """A run that was never interrupted."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    assert run(base, workdir) == 8
    return workdir
