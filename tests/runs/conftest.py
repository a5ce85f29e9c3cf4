"""A base model and a run of it, made once for all tests of the room that take one."""

import pytest
from run_kit import run
from tiny_run import make_base


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="session")
def whole(base, tmp_path_factory):
    """A run that was never interrupted."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    assert run(base, workdir) == 8
    return workdir
