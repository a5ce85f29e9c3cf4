"""Recorded episodes leave a run as trajectories that the format's own package accepts."""

import errno
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from atif import Trajectory
from study_folders import RIGHT, WRONG, episode, write_run

from marl_jax.rollouts import ToolRecord
from marl_jax.run_folder.files import DiskFull
from marl_jax.run_folder.folder import FolderError
from marl_jax.study.trajectories import export_trajectories


def test_every_recorded_episode_is_a_trajectory_of_the_format(tmp_path):
    tools = (ToolRecord("look", {"seen": 1}, None, -1), ToolRecord("run", None, "timeout", 1))
    folder = write_run(
        tmp_path / "run", episodes={2: [(replace(episode(), tools=tools), RIGHT), (episode(), WRONG)]}
    )
    files = export_trajectories(folder, tmp_path / "out")
    assert [file.relative_to(tmp_path / "out").as_posix() for file in files] == [
        "step-000002/00000.json",
        "step-000002/00001.json",
    ]
    read = [Trajectory.model_validate(json.loads(file.read_text())) for file in files]
    first = read[0]
    assert [step.source for step in first.steps] == ["user", "system", *["agent"] * 4]
    assert first.steps[0].message == "12+34=?"
    assert first.steps[1].observation.results[0].content == '{"seen": 1}'
    said = first.steps[3]
    assert said.message == "It is \\boxed{45}" and said.model_name == "p0"
    assert said.observation.results[0].content == "timeout" and said.observation.results[0].extra["failed"]
    assert said.extra["role"] == "generator" and (said.extra["reward"], said.extra["advantage"]) == (
        -0.5,
        -1.2,
    )
    assert (
        len(said.metrics.logprobs) == said.metrics.completion_tokens == len(said.metrics.completion_token_ids)
    )
    assert "advantage" not in first.steps[-1].extra  # it was not trained
    assert first.extra["outcome"] == 1 and read[1].extra["outcome"] == 0 and first.session_id == "run"


def test_an_episode_that_nobody_sampled_is_json_too(tmp_path):
    told = replace(episode(), calls=(replace(episode().calls[0], logprobs=(math.nan,) * 2, tokens=(5, 6)),))
    folder = write_run(
        tmp_path / "run", episodes={1: [(told, {"outcome": 1.0, "rewards": [1.0], "advantages": [0.5]})]}
    )
    (file,) = export_trajectories(folder, tmp_path / "out")
    step = Trajectory.model_validate_json(file.read_text()).steps[-1]
    assert step.metrics.completion_token_ids == [5, 6] and step.metrics.logprobs is None
    assert "NaN" not in file.read_text()


def test_what_cannot_be_written_is_one_line(tmp_path):
    folder = write_run(tmp_path / "run")
    with pytest.raises(FolderError, match="has no recorded episodes: train with"):
        export_trajectories(folder, tmp_path / "out")
    folder = write_run(tmp_path / "other", episodes={1: [(episode(), RIGHT)]})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("")
    with pytest.raises(FolderError, match="is not empty: choose another --out"):
        export_trajectories(folder, tmp_path / "full")
    with pytest.raises(FolderError, match="lies in the run"):
        export_trajectories(folder, folder / "out")


def test_a_full_disk_leaves_nothing_behind_that_the_same_command_is_refused_for(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", episodes={1: [(episode(), RIGHT)], 2: [(episode(), RIGHT)]})
    write = Path.write_text

    def full(path, text, **how):
        if path.parent.name == "step-000002":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, text, **how)

    with (
        monkeypatch.context() as patch,
        pytest.raises(DiskFull, match="make room and start the same command"),
    ):
        patch.setattr(Path, "write_text", full)
        export_trajectories(folder, tmp_path / "out")
    assert len(export_trajectories(folder, tmp_path / "out")) == 2


def test_a_damaged_file_is_told_and_left_out_and_nothing_else_is_refused(tmp_path, caplog):
    folder = write_run(tmp_path / "run", episodes={1: [(episode(), RIGHT)], 2: [(episode(), RIGHT)]})
    first, last = sorted((folder / "episodes").glob("*.parquet"))
    first.write_bytes(first.read_bytes()[:100])
    (written,) = export_trajectories(folder, tmp_path / "out")
    assert written.parent.name == "step-000002" and "step-000001.parquet' cannot be read" in caplog.text
    assert not (tmp_path / "out" / "step-000001").exists()
    last.write_text("")
    with pytest.raises(FolderError, match="holds no episode that can be read"):
        export_trajectories(folder, tmp_path / "none")


def test_episodes_of_the_format_before_are_trajectories_too(tmp_path):
    old = Path(__file__).parents[1] / "fixtures" / "old_run" / "run"
    written = export_trajectories(old, tmp_path / "out")
    names = {path.name.removesuffix(".jsonl.gz") for path in (old / "episodes").glob("*.jsonl.gz")}
    assert {path.parent.name for path in written} == names and written
