"""A run records the episodes of some problems, with the trainer's log-probs, within its share of disk."""

import dataclasses
import itertools

import numpy as np
import pytest

from marl_jax.config.run_config import load_config
from marl_jax.rollouts import CallRecord, Episode, Table, read_episodes
from marl_jax.rollouts.storage import read_extra
from marl_jax.run_folder.folder import FolderError
from marl_jax.runs.recording import record, tool_log
from marl_jax.task import Task


def table_of(problems, samples, length=3):
    rng = np.random.default_rng(0)
    draw = lambda: tuple(map(int, rng.integers(0, 50_000, length)))

    def episode(problem, sample):
        tokens = draw()
        call = CallRecord("solver", "p0", 0, 0, (1, 2), tokens, (-0.5,) * length, "said", "stop", "said")
        return Episode(Task(f"t{problem}", "math", "?"), sample, "single", (call,), "said")

    return Table.of([episode(problem, sample) for problem in range(problems) for sample in range(samples)])


def config_of(steps=20, **overrides):
    texts = {"steps": steps, **{name.replace("__", "."): value for name, value in overrides.items()}}
    return load_config(
        "configs/micro.py:single-shared-xs-math", [(name, str(value)) for name, value in texts.items()]
    )


def decode(tokens):
    return "x" * len(tokens)


def problems_in(path):
    return len({head.task.id for head in read_episodes(path).bare_episodes})


def test_of_a_step_the_first_problems_are_there_with_the_trainers_numbers(tmp_path):
    config = config_of(rollout__samples=2, logging__episodes_problems=3)
    table = table_of(problems=5, samples=2)
    trainer = [None, *(table.logprobs[row] + row for row in range(1, len(table)))]
    for step in range(1, 12):
        record(tmp_path, "step", config, step, table, decode, trainer)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["step-000001", "step-000010"]
    path = tmp_path / "step-000010.parquet"
    assert problems_in(path) == 3 and len(read_episodes(path)) == 6
    extra = read_extra(path)
    assert extra["ends"] == [[1, 2, 3]] * 6 and extra["trainer_logprobs"][0] is None
    np.testing.assert_allclose(extra["trainer_logprobs"][4], [3.5] * 3)


def test_a_file_where_the_folder_of_episodes_shall_be_is_told_in_a_line(tmp_path):
    (tmp_path / "episodes").write_text("")
    with pytest.raises(FolderError, match="episodes"):
        record(tmp_path / "episodes", "step", config_of(), 1, table_of(1, 1), decode, [None])


def test_results_of_tools_that_cannot_be_read_are_told_in_a_line(tmp_path):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "step-3.jsonl").write_text("{]\n")
    with pytest.raises(FolderError, match=r"step-3.jsonl'.*line 1: .*without the file the tools run again"):
        tool_log(tmp_path, "step-3")


def test_of_every_evaluation_the_same_problems_are_there(tmp_path):
    config = config_of(evaluation__recorded=4)
    for step in (0, 10):
        record(tmp_path, "val", config, step, table_of(problems=6, samples=1), decode)
    assert [problems_in(tmp_path / f"val-{step:06d}.parquet") for step in (0, 10)] == [4, 4]
    off = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, recorded=0))
    record(tmp_path, "val", off, 20, table_of(problems=6, samples=1), decode)
    assert not (tmp_path / "val-000020.parquet").exists()


@pytest.mark.parametrize(("megabytes", "fewest", "most"), [(50.0, 8, 8), (0.3, 2, 6), (0.06, 1, 1)])
def test_a_file_has_as_many_problems_as_fit_into_its_share_and_one_where_there_is_room(
    tmp_path, megabytes, fewest, most
):
    config = config_of(evaluation__recorded=8, logging__episodes_size=megabytes)
    record(tmp_path, "val", config, 10, table_of(problems=8, samples=1, length=2000), decode)
    path = tmp_path / "val-000010.parquet"
    assert fewest <= problems_in(path) <= most
    if fewest > 1:  # steps 1, 10, 20 and evaluations 0, 10, 20, counted with a few to spare
        assert path.stat().st_size <= 1e6 * megabytes / 6


@pytest.mark.parametrize(("sizes", "rows"), [((1, 1), 2), ((3, 2, 4), 5)])
def test_problems_of_a_source_are_recorded_whole_whatever_their_number_of_episodes(tmp_path, sizes, rows):
    every = table_of(problems=len(sizes), samples=max(sizes))
    numbers = [number * max(sizes) + sample for number, size in enumerate(sizes) for sample in range(size)]
    config = config_of(rollout__samples=4, logging__episodes_problems=2)
    record(tmp_path, "step", config, 1, every.of_episodes(numbers), decode, [])
    assert len(read_episodes(tmp_path / "step-000001.parquet").bare_episodes) == rows


def test_problems_that_are_too_long_for_a_files_share_are_recorded_less_often_and_never_above_the_budget(
    tmp_path,
):
    config = config_of(steps=500, logging__episodes_size=1)
    table = table_of(
        problems=1, samples=1, length=6000
    )  # several shares of a file: 104 are counted for 500 steps

    def record_both(*steps):
        for step in steps:
            record(tmp_path, "step", config, step, table, decode, [])
            record(tmp_path, "val", config, step, table, decode)

    record_both(*range(0, 501, 10))
    files = sorted(tmp_path.iterdir())
    size = files[0].stat().st_size
    assert 102 * size > 3e6 and 0.9e6 < sum(path.stat().st_size for path in files) <= 1e6
    steps = sorted({int(path.stem[-6:]) for path in files})
    assert steps[0] == 0 and steps[-1] >= 450 and max(b - a for a, b in itertools.pairwise(steps)) <= 50
    played = tmp_path / "test-000100-trained-1f0c8a2e.parquet"  # by `experiments.evaluate`
    played.write_bytes(bytes(900_000))
    record_both(*range(0, 201, 10))  # again, after a kill
    assert sorted({*tmp_path.iterdir()} - {played}) == files
    record(tmp_path / "none", "val", config_of(logging__episodes_size=1e-3), 20, table, decode)
    assert not list((tmp_path / "none").iterdir())
