"""A new project can be tested and trained as it stands, and is written over nothing."""

import os
import subprocess
import sys

import pytest

from marl_jax.commands.new import new_project
from marl_jax.errors import UserError
from marl_jax.packaged import HOME

FILES = ["README.md", "cells.py", "reward.py", "task.py", "test_project.py", "workflow.py"]


@pytest.mark.long
def test_its_own_test_passes_in_its_folder(tmp_path):
    said = new_project(tmp_path / "mine")
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == FILES and "README.md" in said
    env = {**os.environ, "PYTHONPATH": str(HOME.parent)}
    for command in (["-m", "pytest", "-q", "-p", "no:cacheprovider"], ["test_project.py"]):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path / "mine",
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_folder_that_holds_something_is_left_as_it_is(tmp_path):
    (tmp_path / "task.py").write_text("mine")
    with pytest.raises(UserError, match=r"holds task\.py: give a folder that is empty"):
        new_project(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["task.py"]
    with pytest.raises(UserError, match="the folder is missing: marl-jax new DIR"):
        new_project("")
    with pytest.raises(UserError, match="cannot be written"):
        new_project(tmp_path / "task.py" / "below")
