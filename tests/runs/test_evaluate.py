"""Evaluating a run: who plays in which mode, on which problems, compared with what, and what is refused."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
import script
from stored_run import MODEL, SIZES, make_base, make_run, says

from marl_jax.commands import evaluate as evaluation_of_runs
from marl_jax.commands.contenders import Evaluation, make_comparison
from marl_jax.commands.export import export
from marl_jax.config.run_config import ConfigError, DataConfig, load_config
from marl_jax.models import init, load_hf
from marl_jax.rewards.warn import ungraded
from marl_jax.rollouts import read_episodes
from marl_jax.run_folder import folder
from marl_jax.run_folder.checkpoints import CheckpointError
from marl_jax.run_folder.folder import FolderError, open_folder
from marl_jax.run_folder.json_lines import read_lines
from marl_jax.runs.collected import files_of
from marl_jax.runs.loading.parts import PartsError, load_parts
from marl_jax.study.report.html_page import write_report
from marl_jax.tasks import DataError
from marl_jax.terminal.tables import table


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model that answers 1 (which is right) or 2, and picks 1 or 2."""
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    """Voting. After 10 steps the generator (p0) says 2; after 20 it says 1, and the aggregator (p1) picks 2."""
    saved = {10: {"p0": says("2")}, 20: {"p0": says("1"), "p1": says("2")}}
    return make_run(tmp_path_factory.mktemp("run"), base, saved, scores={10: 0.9, 20: 0.1})


@pytest.fixture
def run(trained, tmp_path):
    """A copy of one's own."""
    return shutil.copytree(trained, tmp_path / "run")


def evaluate(run, accept_changes=False, watch=lambda name: None, **asked):
    out = asked.pop("out", None)
    return evaluation_of_runs.evaluate(
        run, Evaluation(**asked), accept_changes=accept_changes, watch=watch, out=out
    )


def lines(run):
    return list(read_lines(run / "eval.jsonl"))


def test_all_checkpoints_are_one_paired_table(run):
    names = []
    records = evaluate(run, checkpoint="all", samples=4, watch=names.append)
    start, worse, better = records
    assert names == ["base", "10", "20"] == [one["checkpoint"] for one in records]
    assert [(one["step"], one["mode"]) for one in records] == [(0, "base"), (10, "trained"), (20, "trained")]
    assert all((one["split"], one["problems"], one["samples"]) == ("test", 8, 4) for one in records)
    assert 0.2 < start["accuracy"] < 0.8 and start["difference"] is None
    assert (worse["accuracy"], better["accuracy"]) == (0.0, 1.0)
    for one in (worse, better):  # problem by problem
        gaps = [a - b for a, b in zip(one["per_problem"], start["per_problem"], strict=True)]
        assert one["difference"]["mean"] == pytest.approx(sum(gaps) / 8)
    assert better["difference"]["low"] > 0 > worse["difference"]["high"]
    assert better["roles"]["generator"] == {"kind": "solver", "calls": 96, "unreadable": 0.0, "accuracy": 1.0}
    assert lines(run) == records

    shown = table(records)
    assert shown.splitlines()[0] == "test: 8 problems x 4 samples, mode trained, seed 0"
    rows = [line.split() for line in shown.splitlines()]
    row, rest = (row for row in rows if row[:1] == ["20"])  # what is too wide for a terminal stands below
    assert max(map(len, shown.splitlines())) <= 80 and len(rest) > 1
    assert row[1] == "100.0%" and row[5].startswith("+") and row[8].endswith("*")
    words = " ".join(shown.split())
    assert "aggregator 20 picks a right answer in 100.0% of 32 cases with one; unreadable 0.0%" in words


def test_answers_that_could_not_be_graded_are_counted(run):
    busy = lambda name: ungraded("no time") if name == "20" else None
    ungraded("of something before")
    base, late = evaluate(run, samples=2, watch=busy)
    assert "ungraded" not in base and late["ungraded"] == 1


def test_the_base_is_played_once_on_the_same_problems_and_noise(run):
    names = []
    first = evaluate(run, samples=2, watch=names.append)
    assert names == ["base", "20"]
    every = evaluate(run, checkpoint="all", samples=2, watch=names.append)  # only what is missing
    assert every[::2] == first
    assert names[2:] == ["10"] and len(lines(run)) == 3
    other = [{"samples": 1}, {"seed": 5}, {"split": "val"}, {"problems": 3}]
    for change in other:
        names.clear()
        evaluate(run, watch=names.append, **{"samples": 2, **change})
        assert names == ["base", "20"], change
    assert [one["problems"] for one in lines(run)[-2:]] == [3, 3]


def test_the_runs_own_evaluation_of_its_start_is_the_base(run):
    (base,) = evaluate(run, checkpoint="base", split="val")
    own = {**base, "mode": "trained"}
    del own["checkpoint"], own["made_with"]  # of what config.json says
    (run / "eval.jsonl").write_text(json.dumps(own) + "\n")
    names = []
    assert evaluate(run, split="val", watch=names.append)[0] == own
    assert names == ["20"]


def test_what_the_run_recorded_before_an_accepted_change_is_no_base(run):
    (base,) = evaluate(run, checkpoint="base", split="val")
    del base["checkpoint"], base["made_with"]
    (run / "eval.jsonl").write_text(json.dumps({**base, "mode": "trained"}) + "\n")
    about = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**about, "changes": [["versions.code: a -> b"]]}))
    names = []
    evaluate(run, checkpoint="base", split="val", watch=names.append)
    assert names == ["base"]


def test_a_base_that_answered_other_problems_or_was_graded_by_other_code_is_played_again(run, monkeypatch):
    names, here = [], folder.versions()
    first = evaluate(run, watch=names.append)
    assert first[0]["made_with"]["code"] == here["code"]
    monkeypatch.setitem(SIZES, "test", 9)
    evaluate(run, problems=8, watch=names.append)  # as many problems, of a split that has grown
    monkeypatch.setattr(folder, "versions", lambda: {**here, "code": "a mended grader"})
    evaluate(run, problems=8, watch=names.append)
    monkeypatch.setattr(folder, "versions", lambda: {**here, "math-verify": "0.0"})
    evaluate(run, problems=8, watch=names.append)
    assert names == ["base", "20"] * 4
    monkeypatch.undo()
    assert evaluate(run, watch=names.append) == first and len(names) == 8


def test_what_was_played_under_another_configuration_is_played_again(run):
    """As after a resume with --accept_changes: a base of four calls is no base of six."""
    names, file = [], run / "config.json"
    evaluate(run, watch=names.append)
    about = json.loads(file.read_text())
    about["config"]["learner"]["logprob_chunk"] = 7  # of no account here
    file.write_text(json.dumps(about))
    assert [one["calls_per_episode"] for one in evaluate(run, watch=names.append)] == [4, 4]
    about["config"]["workflow"]["settings"] = {"votes": 5}
    file.write_text(json.dumps(about))
    assert [one["calls_per_episode"] for one in evaluate(run, watch=names.append)] == [6, 6]
    assert names == ["base", "20"] * 2


def test_with_out_nothing_is_written_to_the_run(run, tmp_path):
    state = lambda: {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != ".lock"}
    before, out = state(), tmp_path / "beside"
    with open_folder(run):  # somebody else may be at it
        records = evaluate(run, out=out)
    assert state() == before
    assert [line["checkpoint"] for line in read_lines(out / "eval.jsonl")] == ["base", "20"]
    assert all((out / line["episodes"]).exists() for line in records)
    names = []
    assert evaluate(run, out=out, watch=names.append) == records and names == ["20"]
    with pytest.raises(FolderError, match="lies in the run"):
        evaluate(run, out=run / "checkpoints")
    other = {**records[-1], "step": 77, "checkpoint": "77"}
    with (out / "eval.jsonl").open("a") as file:
        file.write(json.dumps({**other, "run": str(run.parent / "another")}) + "\n")
    page = write_report(run, out)
    assert "step 20" in page.read_text() and "step 77" not in page.read_text()
    assert page == out / "report.html" and page.exists() and not (run / "report.html").exists()


def test_runs_of_two_workflows_evaluated_into_one_folder_have_each_its_base(run, base, tmp_path):
    single = make_run(tmp_path / "single", base, {5: {"p0": says("1")}}, "single-shared-xs-math")
    for one, calls in ((run, 4), (single, 1)):
        records = evaluate(one, out=tmp_path / "beside")
        assert [record["calls_per_episode"] for record in records] == [calls, calls]


def test_a_base_that_two_runs_have_in_one_folder_is_on_the_pages_of_both(run, trained, tmp_path):
    names, out = [], tmp_path / "beside"
    first = evaluate(trained, out=out)
    for _ in range(2):
        assert evaluate(run, out=out, checkpoint="base", watch=names.append) == [first[0] | {"run": str(run)}]
    assert [(line["run"], line["step"]) for line in read_lines(out / "eval.jsonl")] == [
        (str(trained), 0),
        (str(trained), 20),
        (str(run), 0),
    ]
    assert not names


def test_problems_of_another_data_set_are_recorded_under_its_name(run, tmp_path):
    """They are no records of the run's own test split, whatever reads these."""
    rows = [{"problem": f"{n}+1=?", "answer": str(n + 1), "id": f"other-{n}"} for n in range(3)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    start, late = evaluate(run, checkpoint="20", data="jsonl", data_directory=str(tmp_path))
    assert (late["split"], late["problems"], late["of_problems"]) == ("jsonl-test", 3, 3)
    assert start["data"] == late["data"] != evaluate(run, checkpoint="20")[-1]["data"]
    assert {line["split"] for line in lines(run)} == {"jsonl-test", "test"}
    with pytest.raises(FolderError, match="is not a file or folder with episodes of training steps"):
        files_of(run / "episodes")  # evaluations are no training data
    with pytest.raises(FolderError, match="--data_directory belongs to --data=NAME"):
        evaluate(run, data_directory=str(tmp_path))
    with pytest.raises(ConfigError, match="'humaneval' is code"):
        evaluate(run, data="humaneval")


def test_another_data_set_is_without_what_only_that_of_the_training_has():
    drawn = DataConfig(train_size=64, test_size=16, levels=(1,), cache="there", problems=8)
    files = DataConfig(name="jsonl", directory="files", levels=(1,), cache="there", problems=8)
    assert evaluation_of_runs._data(drawn, "jsonl", "files") == files
    assert evaluation_of_runs._data(drawn, "micro_math", None) == drawn
    assert evaluation_of_runs._data(drawn, "own:problems", None).cache is None
    skipping = dataclasses.replace(files, bad_rows="skip", val_size=5)
    assert evaluation_of_runs._data(skipping, "math500", None).bad_rows == "skip"
    assert evaluation_of_runs._data(skipping, "micro_math", None).bad_rows == "refuse"


def test_an_evaluation_that_is_refused_leaves_the_file_of_another_alone(run, tmp_path, monkeypatch):
    """Both write beside the run; one has begun, and has no record yet."""
    out, play = tmp_path / "beside", evaluation_of_runs.player_of

    def refused_meanwhile(*args):
        with pytest.raises(CheckpointError):
            evaluate(run, out=out, checkpoint="77")
        return play(*args)

    monkeypatch.setattr(evaluation_of_runs, "player_of", refused_meanwhile)
    assert [line["checkpoint"] for line in evaluate(run, out=out)] == ["base", "20"]
    assert [line["checkpoint"] for line in read_lines(out / "eval.jsonl")] == ["base", "20"]


def test_latest_best_and_a_step(run):
    for which, step in ((None, 20), ("latest", 20), ("best", 10), ("10", 10)):
        assert evaluate(run, checkpoint=which)[-1]["step"] == step
    for which in ("base", "0"):
        assert [one["checkpoint"] for one in evaluate(run, checkpoint=which)] == ["base"]
    assert [one["mode"] for one in evaluate(run, mode="base")] == ["base"]


def test_roles_exchange_policies(run):
    start, swapped = evaluate(run, mode="swapped", samples=4)
    assert (start["mode"], swapped["mode"], swapped["step"]) == ("base", "swapped", 20)
    # The aggregator's policy answers 2, and the generator's picks the first.
    assert (swapped["accuracy"], swapped["roles"]["generator"]["accuracy"]) == (0.0, 0.0)


def test_a_roles_policy_plays_alone_and_is_compared_with_its_start_alone(run):
    start, alone = evaluate(run, mode="single_transfer", samples=4)
    assert [one["mode"] for one in (start, alone)] == ["single_transfer"] * 2
    assert (alone["accuracy"], alone["role"], list(alone["roles"])) == (1.0, "generator", ["generator"])
    assert alone["calls_per_episode"] == 1 and 0.2 < start["accuracy"] < 0.8
    other = evaluate(run, mode="single_transfer", role="aggregator", samples=4)
    assert (other[1]["accuracy"], other[0]["difference"]) == (0.0, None)
    assert "role aggregator" in table(other)
    assert len(lines(run)) == 4  # nothing of another role, or of the workflow, was taken for a base


@pytest.mark.parametrize(
    "changes",
    [
        {"learner.learning_rates": '{"p0": 0.001, "p1": 0.1}'},
        {"learner.learning_rates": '{"p0": 0.001}', "policies.frozen_roles": "aggregator"},
        {"policies.trains": '{"p0": "lora"}', "policies.frozen_roles": "aggregator"},
        {"rollout.samples": "1", "advantages.group": "task", "rewards.name": "own_correctness"},
    ],
)
def test_settings_of_training_refuse_no_cast(base, changes):
    """A rate or a form of a policy that is not there, or is another role's; samples of one."""
    fields = {"policies.base": base} | changes
    config = load_config("configs/micro.py:voting-isolated-xs-math", [*fields.items()])
    parts = load_parts(config)
    swapped = make_comparison(
        Evaluation(mode="swapped"), config, parts, accept_changes=False
    ).contender.config
    assert swapped.policies.map == {"generator": "p1", "aggregator": "p0"}
    for role, policy in config.policies.map.items():
        alone = Evaluation(mode="single_transfer", role=role)
        assert make_comparison(alone, config, parts, False).contender.config.policies.map == {
            "generator": policy
        }


def test_a_single_agents_policy_plays_the_generator(run, base, tmp_path):
    saved = {5: {"p0": says("1")}, 6: {"p0": says("2")}}
    donor = make_run(tmp_path / "donor", base, saved, "single-shared-xs-math", scores={5: 1.0})
    start, with_it = evaluate(
        run, mode="generator_transfer", generator_from=donor, generator_checkpoint="best", samples=4
    )
    # The others are as they began, unless asked for otherwise.
    assert (start["mode"], with_it["mode"], with_it["checkpoint"]) == ("base", "generator_transfer", "base")
    assert (with_it["generator_step"], with_it["role"]) == (5, "generator")
    assert (with_it["accuracy"], with_it["roles"]["generator"]["accuracy"]) == (1.0, 1.0)
    assert with_it["roles"]["aggregator"]["possible"] == 32
    assert with_it["difference"]["mean"] == pytest.approx(1 - start["accuracy"])
    _, latest = evaluate(run, mode="generator_transfer", generator_from=donor, checkpoint="latest")
    assert (latest["step"], latest["generator_step"], latest["accuracy"]) == (20, 6, 0.0)


@pytest.mark.campaign
def test_lora_policies_are_served_with_their_base(base, tmp_path):
    changes = {"policies__train": "lora", "policies__lora_rank": 4}
    run = make_run(tmp_path, base, {1: {}}, **changes)
    start, same = evaluate(run, samples=2)
    assert same["per_problem"] == start["per_problem"]  # a fresh adapter is the base


def test_a_damaged_checkpoint_of_many_is_left_out(run):
    def damage(step):
        seal = run / "checkpoints" / step / "seal.json"
        seal.write_text(seal.read_text()[:-20])

    damage("10")
    assert [one["checkpoint"] for one in evaluate(run, checkpoint="all")] == ["base", "20"]
    damage("20")
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged: nothing to evaluate"):
        evaluate(run, checkpoint="all", watch=refused("there is no checkpoint"))
    with pytest.raises(CheckpointError, match="checkpoint 10 is damaged"):
        evaluate(run, checkpoint="10")


def test_a_checkpoint_that_its_run_removes_while_others_are_played_is_left_out(run):
    def watch(name):
        if name == "base":
            shutil.rmtree(run / "checkpoints" / "20")

    assert [one["checkpoint"] for one in evaluate(run, checkpoint="all", watch=watch)] == ["base", "10"]


def refused(what):
    """Nothing was played before it."""

    def watch(name):
        raise AssertionError(f"{name} is played although {what}")

    return watch


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"samples": 0}, "--samples is 0; it must be at least 1"),
        ({"problems": 0}, "--problems is 0; it must be at least 1"),
        ({"seed": -1}, "--seed is -1; it must be at least 0"),
        ({"seed": 2**31}, "--seed is 2147483648; it must be at most 2147483647"),
        ({"mode": "swaped"}, "--mode=swaped is unknown: did you mean 'swapped'?"),
        ({"split": "tset"}, "--split=tset is unknown: did you mean 'test'?"),
        ({"split": "train"}, "--split=train is unknown; there is: test, val"),
        ({"checkpoint": "bets"}, "--checkpoint=bets is unknown: did you mean 'best'?"),
        ({"checkpoint": "15"}, "there is no checkpoint of step 15 in .*; there is: 10, 20"),
        ({"mode": "base", "checkpoint": "20"}, "--mode=base plays the base, not --checkpoint=20"),
        ({"mode": "single_transfer", "role": "generater"}, "no role of this run: did you mean 'generator'?"),
        *(
            ({"mode": mode, "role": "generator"}, "--role=.* has no effect with")
            for mode in ("trained", "swapped")
        ),
        ({"mode": "generator_transfer"}, "--generator_from=DIR belongs to --mode=generator_transfer"),
        ({"generator_from": "x"}, "--generator_from=DIR belongs to --mode=generator_transfer"),
        ({"mode": "generator_transfer", "generator_from": "x"}, "there is no run in '.*/x'"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(trained, asked, message):
    with pytest.raises((FolderError, CheckpointError), match=message) as refusal:
        evaluate(trained, watch=refused(asked), **asked)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("eval.jsonl", "hello\n", "holds a line that is no JSON object with a step"),
        ("eval.jsonl", '{"steps": 1}\n', "holds a line that is no JSON object with a step"),
        ("eval.jsonl", None, "eval.jsonl' cannot be used"),
        ("config.json", "[]", "there is no run in .*its config.json is not a run's"),
        ("config.json", '{"model_type": "qwen3"}', "there is no run in .*its config.json is not a run's"),
        ("config.json", '{"config": "x"}', "is damaged .config, digests"),
        ("config.json", {"settled": 1}, "is damaged .settled."),
        ("config.json", {"config": {"schema": 1, "steps": []}}, "the configuration in .* cannot be used"),
        ("config.json", {"settled": {"engine": [1]}}, "broken settled.engine"),
    ],
)
def test_a_broken_folder_is_one_line_before_anything_is_built(run, monkeypatch, name, text, message):
    monkeypatch.setattr(evaluation_of_runs, "make_service", None)
    path = run / name
    if isinstance(text, dict):
        text = json.dumps({**json.loads(path.read_text()), **text})
    path.unlink(missing_ok=True)
    path.mkdir() if text is None else path.write_text(text)
    with pytest.raises(FolderError, match=message) as refusal:
        evaluate(run)
    assert "\n" not in str(refusal.value)
    if name == "config.json" and "engine" not in message:  # which is nothing to an export
        with pytest.raises(FolderError, match=message):
            export(run, "p0", run.parent / "out")


def test_before_training_there_is_nothing_but_the_base(base, tmp_path):
    with pytest.raises(FolderError, match=r"there is no run in '.*' \(no config.json\): train it first"):
        evaluate(tmp_path / "none")
    with pytest.raises(FolderError, match="--workdir is missing"):
        evaluate("")
    assert not (tmp_path / "none").exists()
    run = make_run(tmp_path / "begun", base)
    for which in ("latest", "best", "all", "7"):
        with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*: train first"):
            evaluate(run, checkpoint=which)
    assert len(evaluate(run, checkpoint="base")) == 1


def test_a_split_without_problems_and_a_missing_base_are_told(trained, base, tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES, "test", 0)
    with pytest.raises(DataError, match="'stored_run:questions' has no problems in its test split"):
        evaluate(trained, watch=refused("there is no problem"))
    gone = shutil.copytree(base, tmp_path / "base")
    run = make_run(tmp_path / "run", gone, {1: {}})
    shutil.rmtree(gone)
    with pytest.raises(PartsError, match=r"there is no model in '.*/base', .*: put it back$"):
        evaluate(run, watch=refused("there is no base"), out=tmp_path / "out")
    assert not [*(tmp_path / "out").iterdir()]
    begun = json.loads((run / "config.json").read_text())
    begun["config"]["policies"]["base"] = "gone/base"
    (run / "config.json").write_text(json.dumps(begun))
    with pytest.raises(PartsError, match=r"put it back, or start in the folder where the run was trained$"):
        evaluate(run, watch=refused("there is no base"))


def test_problems_that_were_learned_from_are_told(run, caplog, monkeypatch):
    """Those of test are the four of train and four more."""
    evaluate(run, checkpoint="base")
    assert (
        "'stored_run:questions': 4 of the 8 problems of test have a question that is in train, too"
        in caplog.text
    )
    caplog.clear()
    monkeypatch.delitem(SIZES, "train")
    evaluate(run, checkpoint="base")
    assert "in train, too" not in caplog.text


def test_policies_that_cannot_play_here_are_refused(trained, base, tmp_path):
    shared = make_run(tmp_path / "shared", base, {1: {}}, "voting-shared-xs-math")
    with pytest.raises(
        FolderError, match="--mode=swapped needs several policies; in this run 'p0' answers for all"
    ):
        evaluate(shared, mode="swapped", watch=refused("roles share"))

    def transfer(workdir):
        evaluate(trained, mode="generator_transfer", generator_from=workdir, watch=refused("it does not fit"))

    with pytest.raises(
        FolderError, match="has the roles generator, aggregator: --generator_from must be the run of a single"
    ):
        transfer(shared)
    wide = dataclasses.replace(MODEL, intermediate_size=48)
    other = make_base(tmp_path / "wide", init(0, wide), wide)
    with pytest.raises(FolderError, match="has another shape than this run's"):
        transfer(make_run(tmp_path / "a", other, {1: {}}, "single-shared-xs-math"))
    other = make_base(tmp_path / "worded")
    tokenizer = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "model_max_length": 7}))
    with pytest.raises(FolderError, match="has another tokenizer than this run"):
        transfer(make_run(tmp_path / "b", other, {1: {}}, "single-shared-xs-math"))


def test_a_base_that_is_not_the_one_trained_on_is_refused_unless_accepted(tmp_path):
    base = make_base(tmp_path / "base")
    run = make_run(tmp_path / "run", base, {1: {}}, settled=False)
    make_base(base, says("1"))
    with pytest.raises(FolderError, match=r"is no longer there \(base .* -> .*\): put it back, or accept"):
        evaluate(run, watch=refused("the base has changed"))
    start, _ = evaluate(run, accept_changes=True)
    assert start["accuracy"] == 1.0


def test_rows_added_after_training_are_told_since_they_bring_learned_ones_into_test(base, tmp_path):
    """The tenth that is held out of 210 rows is another than that of 200: half of it was trained on."""
    file = tmp_path / "train.jsonl"
    rows = [json.dumps({"question": f"{n}?", "answer": n}) + "\n" for n in range(210)]
    file.write_text("".join(rows[:200]))
    run = make_run(
        tmp_path / "run", base, {1: {}}, data__name="jsonl", data__directory=tmp_path, evaluation__problems=8
    )
    file.write_text("".join(rows))
    with pytest.raises(FolderError, match=r"is no longer there \(data train: .* -> .*\): put it back"):
        evaluate(run, watch=refused("the rows have changed"))


def test_a_run_that_is_training_is_left_alone(run):
    with (
        open_folder(run),
        pytest.raises(FolderError, match=r"another process .* is running in .*, or give --out=DIR"),
    ):
        evaluate(run)


ON_TWO_DEVICES = """
import sys
from stored_run import make_run, says
make_run(sys.argv[1], sys.argv[2], {3: {"p0": says("1")}}, mesh__model=2)
"""


@pytest.mark.long
def test_a_run_of_two_devices_is_evaluated_and_exported_on_one(base, tmp_path, caplog):
    paths = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
    env = {"JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": ":".join(paths)}
    command = [sys.executable, "-c", ON_TWO_DEVICES, tmp_path / "run", base]
    subprocess.run(command, check=True, cwd=paths[0], env={**os.environ, **env})
    start, played = evaluate(tmp_path / "run", samples=4)
    told = "the run's mesh has 2 devices and 1 are here: one of them is used"
    assert sum(told in line for line in caplog.messages) == 1
    assert played["roles"]["generator"]["accuracy"] == 1.0 > start["roles"]["generator"]["accuracy"]
    done = export(tmp_path / "run", "p0", tmp_path / "out")
    assert done.step == 3
    jax.tree.map(np.testing.assert_array_equal, load_hf(tmp_path / "out")[1], says("1"))


def test_the_script_prints_the_table_and_refuses_in_one_line(run, capsys):
    def printed(*flags):
        assert script.run("experiments.evaluate", f"--workdir={run}", *flags) == 0
        return capsys.readouterr().out

    assert printed("--checkpoint=20", "--split=val", "--samples=2") == table(lines(run)) + "\n"
    assert printed("--mode=base", "--samples=4") == table(lines(run)[-1:]) + "\n"
    shown = printed("--mode=single_transfer", "--role=aggregator", "--samples=4")
    assert shown == table(lines(run)[-2:]) + "\n" and "role aggregator" in shown
    assert script.run("experiments.evaluate", f"--workdir={run}", "--samples=0") == 2
    assert capsys.readouterr() == ("", "--samples is 0; it must be at least 1\n")
    assert script.run("experiments.evaluate", f"--workdir={run}", "--generator_checkpoint=best") == 2
    assert capsys.readouterr().err.startswith("--generator_checkpoint belongs to --generator_from=DIR")


def ones(table):
    """A metric: the share of an episode's calls that say 1."""
    said = np.array([answer == "1" for answer in table.answer], float)
    return np.bincount(table.episode, said, len(table.bare_episodes)) / np.bincount(table.episode)


def test_episodes_of_an_evaluation_are_kept_and_their_rows_have_a_key(run):
    (start, late) = evaluate(run, checkpoint="20", samples=2)
    assert start["episodes"] != late["episodes"]
    for record in (start, late):
        told = read_episodes(run / record["episodes"])
        assert len(told.bare_episodes) == record["problems"] * record["samples"]
        right = [head.outcome for head in told.bare_episodes]
        assert np.reshape(right, (-1, 2)).mean(axis=1).tolist() == record["per_problem"]
    rows = pq.read_table(run / late["episodes"]).to_pylist()
    assert len({(row["task"], row["sample"], row["call"]) for row in rows}) == len(rows) > 0
    assert {row["question"] for row in rows} == {f"{i}*{i}=?" for i in range(SIZES["test"])}
    (run / "eval.jsonl").unlink()
    assert evaluate(run, checkpoint="20", samples=2) == [start, late]  # the same play, in the same file


def test_an_evaluation_is_by_the_metric_of_the_run(base, tmp_path):
    folder = make_run(tmp_path / "run", base, {10: {"p0": says("1")}}, evaluation__metric=f"{__name__}:ones")
    start, late = evaluate(folder, samples=4)
    assert start["metric"] == late["metric"] == f"{__name__}:ones"
    rows = pq.read_table(folder / late["episodes"]).to_pylist()
    by_task = {}
    for row in rows:
        by_task.setdefault(row["task"], []).append(row["answer"] == "1")
    assert late["per_problem"] == pytest.approx([np.mean(said) for said in by_task.values()])
    assert 0.75 < late["accuracy"] < 1  # three generators say 1, the aggregator 1 or 2
    assert evaluate(folder, samples=4, checkpoint="10")[0] == start  # found again
    alone = evaluate(folder, mode="single_transfer", samples=4)[-1]  # whose role is another
    heads = read_episodes(folder / alone["episodes"]).bare_episodes
    assert "metric" not in alone
    assert alone["accuracy"] == np.mean([head.answer == head.task.gold for head in heads])
