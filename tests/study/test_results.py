"""Results beside the code say of a run what its folder says, with fewer steps and no words."""

import dataclasses
import functools
import json
import os

import pytest
import script
from study_folders import config, evaluation, full_run, metrics, write_lines, write_run

from marl_jax.alarms.watch import judge
from marl_jax.run_folder.folder import FolderError
from marl_jax.study import cliffs, results, run_sentences, seeds
from marl_jax.study.record import read_run
from marl_jax.study.report import curves


@pytest.fixture
def collected(tmp_path):
    root = tmp_path / "runs"
    full_run(root / "voting-isolated-s-math" / "seed-0")
    (path,), _ = results.collect(root, tmp_path / "results")
    return read_run(root / "voting-isolated-s-math" / "seed-0"), path


def test_a_result_is_read_as_the_run_that_it_was_made_from(collected):
    run, path = collected
    again = results.read_result(path)
    assert path.relative_to(path.parents[1]).as_posix() == "voting-isolated-s-math/seed-0.run.json"
    made = again.about["made"]
    assert again.about == {**run.about, "made": made} and again.evaluations == run.evaluations
    assert made["machine"] and made["seconds"] == pytest.approx(
        sum(line["time/step"] for line in run.metrics), rel=0.01
    )
    assert (again.step, again.steps, again.finished) == (run.step, run.steps, True)
    assert seeds.measures(again).keys() == seeds.measures(run).keys()
    assert (cliffs.course(again) is None) == (cliffs.course(run) is None)


def test_an_accelerator_and_seeds_side_by_side_are_told_by_the_run(collected):
    run, path = collected
    about = {
        **run.about,
        "config": run.config | {"seeds": 4},
        "versions": run.about["versions"] | {"device": "NVIDIA H200"},
        "settled": run.about["settled"] | {"devices": 1},
    }
    made = results.compact(dataclasses.replace(run, about=about))["about"]["made"]
    alone = results.read_result(path).about["made"]["seconds"]
    assert made["machine"] == "1 x NVIDIA H200" and made["seconds"] == pytest.approx(alone / 4, abs=0.1)


def test_metrics_are_thinned_with_both_ends(collected):
    run, path = collected
    again = results.read_result(path)
    steps = [line["step"] for line in again.metrics]
    assert len(steps) == results.STEPS < len(run.metrics) and (steps[0], steps[-1]) == (1, run.step)
    whole = {line["step"]: line["reward"] for line in run.metrics}
    assert [line["reward"] for line in again.metrics] == [float(f"{whole[step]:.4g}") for step in steps]


def test_rewards_of_problems_that_were_drawn_again_are_known_as_no_fair_sample(tmp_path):
    write_run(
        tmp_path / "runs" / "a", about=config(steps=1), lines=[metrics(1, **{"draws/first_reward": 0.4})]
    )
    (path,), _ = results.collect(tmp_path / "runs", tmp_path / "results")
    assert any("no fair sample" in panel.how for panel in curves.panels(results.read_result(path)))


def test_alarms_are_kept_as_all_rows_told_them(tmp_path):
    lines = [metrics(step) for step in range(1, 91)]  # in which the aggregator comes to write at length
    folder = write_run(tmp_path / "runs" / "a", about=config(steps=90), lines=lines)
    (path,), _ = results.collect(tmp_path / "runs", tmp_path / "results")
    run, again = read_run(folder), results.read_result(path)
    assert "length (aggregator)" in [alarm.title for alarm in run.watch.alarms]
    assert len(again.metrics) < 90 and not judge(again.metrics).alarms
    assert cliffs.why_none(again) == cliffs.why_none(run) != ""  # of peak and terminal
    assert again.watch.alarms == run.watch.alarms and run_sentences.alarms(again) == run_sentences.alarms(run)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": 9, "about": {}, "metrics": {}, "evaluations": []}']
)
def test_a_file_that_is_no_result_is_named(tmp_path, text):
    path = tmp_path / "odd.run.json"
    path.write_text(text)
    with pytest.raises(FolderError, match=r"odd\.run\.json' is no result of a run"):
        results.read_result(path)


def changed(record, path, value):
    """The same with another value at a dotted path, or without what is there."""
    *above, last = (int(name) if name.isdigit() else name for name in path.split("."))
    at = functools.reduce(lambda at, name: at[name], above, record)
    if value is GONE:
        del at[last]
    else:
        at[last] = value
    return record


GONE = object()
ODD_RESULTS = [
    ("about.config.policies", None, "config.policies is null"),
    ("about.config.workflow", "voting", 'config.workflow is "voting"'),
    ("about.config.policies.map.generator", ["p0"], 'config.policies.map.generator is ["p0"]'),
    ("about.versions.jax", None, "versions.jax is null"),
    ("about.changes", [5], "a change is 5"),
    ("about.made.seconds", "long", 'made.seconds is "long"'),
    ("evaluations.1", None, "an evaluation: null"),
    ("evaluations.1.step", GONE, "an evaluation: step is null"),
    ("evaluations.1.step", "10", 'an evaluation: step is "10"'),
    ("evaluations.1.accuracy", "high", 'an evaluation: accuracy is "high"'),
    ("evaluations.1.accuracy", float("nan"), "an evaluation: accuracy is NaN"),
    ("alarms", [{"name": "length"}], "an alarm: who is null"),
    ("alarms", 5, "is no result"),
    ("metrics.step.0", None, "a line of metrics: step is null"),
    ("metrics.step", GONE, "a line of metrics: step is null"),
    ("metrics.reward.0", "x", 'reward of step 1 is "x"'),
    ("metrics.reward", [0.5], "columns of metrics have different lengths"),
]
ODD_RUNS = [
    ("config.policies", None, "config.policies is null"),
    ("config.steps", "many", 'config.steps is "many"'),
    ("config.seed", "x", 'config.seed is "x"'),
    ("changes", [5], "a change is 5"),
    ("eval.1.accuracy", "high", 'an evaluation: accuracy is "high"'),
    ("eval.1.roles.generator", None, "an evaluation: roles.generator is null"),
    ("metrics.0.reward", "x", 'reward of step 1 is "x"'),
    ("metrics.0.reward", [1], "reward of step 1 is [1]"),
    ("metrics.0.reward", 10**400, "reward of step 1 is 1000"),
    ("metrics.0.step", 10**30, "step of step 1000"),
]


@pytest.mark.parametrize(("path", "value", "why"), ODD_RESULTS)
def test_of_seeds_the_odd_result_is_left_out_and_told_why(tmp_path, path, value, why):
    for seed in range(3):
        full_run(tmp_path / "runs" / "a" / f"seed-{seed}", steps=10)
    files, _ = results.collect(tmp_path / "runs", tmp_path / "results")
    files[1].write_text(json.dumps(changed(json.loads(files[1].read_text()), path, value)))
    study = results.read_study(tmp_path / "results")
    assert list(study.runs) == ["a/seed-0", "a/seed-2"]
    (line,) = study.unread
    assert "seed-1.run.json' is no result of a run" in line and why in line


@pytest.mark.parametrize(("path", "value", "why"), ODD_RUNS)
def test_of_run_folders_the_odd_one_is_left_out_and_told_why(tmp_path, path, value, why):
    for name in ("odd", "sound"):
        folder = full_run(tmp_path / name, steps=10)
    file, _, rest = path.partition(".")
    if rest and file in ("eval", "metrics"):
        lines = (tmp_path / "odd" / f"{file}.jsonl").read_text().splitlines()
        write_lines(tmp_path / "odd" / f"{file}.jsonl", changed([*map(json.loads, lines)], rest, value))
    else:
        about = json.loads((folder / "config.json").read_text())
        (tmp_path / "odd" / "config.json").write_text(json.dumps(changed(about, path, value)))
    study = results.read_study(tmp_path)
    assert list(study.runs) == ["sound"] and len(study.unread) == 1
    assert "odd" in study.unread[0] and why in study.unread[0]


def test_a_run_that_cannot_be_made_compact_leaves_the_others_their_results(tmp_path):
    for name in ("odd", "sound"):
        folder = full_run(tmp_path / name, steps=10)
    about = json.loads((folder / "config.json").read_text())
    (tmp_path / "odd" / "config.json").write_text(json.dumps(changed(about, "config.seeds", 0)))
    written, (line,) = results.collect(tmp_path, tmp_path / "out")
    assert written == [tmp_path / "out" / "sound.run.json"] and "odd' has no result" in line


def test_folders_that_cannot_be_listed_are_named(tmp_path, monkeypatch):
    full_run(tmp_path / "mine", steps=10)
    (tmp_path / "closed").mkdir()
    listed, refused = os.scandir, tmp_path / "closed"

    def scandir(path):
        if str(path) == str(refused):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    why = [f"'{refused}' cannot be read: Permission denied"]
    study = results.read_study(tmp_path)
    assert list(study.runs) == ["mine"] and study.unread == why
    assert results.collect(tmp_path, tmp_path / "out")[1] == why
    refused = tmp_path
    with pytest.raises(FolderError, match=f"'{tmp_path}' cannot be read: Permission denied"):
        results.read_study(tmp_path)


def test_a_directory_without_finished_runs_is_refused(tmp_path):
    with pytest.raises(FolderError, match="no finished run in or below"):
        results.collect(tmp_path, tmp_path / "out")


def test_a_run_and_the_current_folder_are_a_root_and_a_place_like_others(collected, tmp_path, monkeypatch):
    run, path = collected
    monkeypatch.chdir(path.parent)
    assert results.collect(run.folder, ".")[0] == [path.parent / "seed-0.run.json"]
    with pytest.raises(FolderError, match="lies in the run"):
        results.collect(tmp_path / "runs", run.folder / "results")


def test_damaged_files_of_a_run_are_told_where_it_is_collected(tmp_path, capsys):
    along = [evaluation(0, 0.5), evaluation(20, 0.5)]
    folder = write_run(
        tmp_path / "runs" / "a", about=config(steps=30), lines=[metrics(30)], evaluations=along
    )
    write_run(tmp_path / "runs" / "b", about=config(steps=30), lines=[metrics(30)])
    asked = "experiments.collect", f"--root={tmp_path / 'runs'}", f"--out={tmp_path / 'results'}"
    assert script.run(*asked) == 0
    assert (
        "a.run.json: eval.jsonl is damaged: it lacks the evaluation of step 10\n" in capsys.readouterr().err
    )
    for name in ("eval.jsonl", "metrics.jsonl"):
        whole = (folder / name).read_text()
        (folder / name).write_text("{]\n" + whole)
        assert script.run(*asked) == 2
        said = capsys.readouterr()
        assert f"a/{name}' holds a line that is no JSON object with a step" in said.err
        assert said.out == f"1 results in {tmp_path / 'results'}\n"  # those behind it are kept
        (folder / name).write_text(whole)


def test_a_result_beside_its_run_does_not_stand_for_it(tmp_path):
    folder = full_run(tmp_path / "a" / "seed-7", steps=30)
    results.collect(tmp_path, tmp_path)
    study = results.read_study(tmp_path)
    assert not study.runs["a/seed-7"].compact and len(study.runs["a/seed-7"].metrics) == 30
    (folder / "metrics.jsonl").write_text("{]\n")
    study = results.read_study(tmp_path)
    assert study.runs["a/seed-7"].compact and len(study.unread) == 1


def test_results_hold_no_place_of_the_machine(collected):
    run, path = collected
    assert str(run.folder.parents[1]) not in json.dumps(json.loads(path.read_text()))
