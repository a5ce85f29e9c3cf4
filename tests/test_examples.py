"""The programs in examples/ run as they stand, on a model of random weights and for two steps."""

import dataclasses
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import script
from absl import logging
from notebook import notebook_of
from run_names import undocumented

from examples import own_loop, own_problems, own_recipe
from marl_jax.models import ModelConfig, init, save_hf
from marl_jax.models.tokenizer import build_micro_tokenizer
from marl_jax.rollouts import read_episodes
from marl_jax.run_folder.json_lines import read_lines
from marl_jax.runs.loading import play
from marl_jax.runs.loading.parts import load_tasks
from marl_jax.task import Task
from recipes import run as recipe_run
from recipes.recipe import changed

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
PROGRAMS = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
TRAINED = {  # {program: roles}
    "own_workflow": {"generator", "evaluator"},
    "own_task": {"generator"},
    "own_reward": {"generator", "aggregator"},
    "forks": {"orchestrator", "worker"},
}
READ = []  # splits, by training
SMALL = (
    "steps=2",
    "data.problems=2",
    "rollout.samples=2",
    "sampling.max_new_tokens=8",
    "engine.max_prompt=72",
    "engine.lanes=8",
    "engine.steps=4",
    "evaluation.problems=4",
    "logging.episodes_every=1",
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    model = dataclasses.replace(
        ModelConfig.preset("xs"), num_hidden_layers=1, hidden_size=32, intermediate_size=64
    )
    directory = tmp_path_factory.mktemp("base")
    save_hf(directory, model, init(0, model), build_micro_tokenizer())
    return directory


def run(program, *arguments):
    assert script.run(f"examples.{program}", *arguments) == 0


@pytest.fixture(scope="module", params=TRAINED)
def trained(request, base, tmp_path_factory):
    """(program, the folder of its run)."""
    workdir = tmp_path_factory.mktemp(request.param) / "run"
    small = [f"--config.{setting}" for setting in (*SMALL, f"policies.base={base}")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(play, "load_tasks", lambda data, split: READ.append(split) or load_tasks(data, split))
        run(request.param, workdir, *small)
    assert logging.get_verbosity() == logging.WARNING  # no library talks into the live view
    return request.param, workdir


def test_every_program_is_run_here():
    alone = {"sample", "losses", "own_loop", "compiled_step", "own_recipe", "own_problems"}
    assert set(PROGRAMS) == {*TRAINED, *alone}


def test_every_problem_that_a_run_makes_is_a_group_and_its_answer_is_computed(tmp_path):
    """On a base that writes sums; over two steps each solver's group is one sum, whoever wrote it."""
    changes = (
        "steps=2",
        "data.problems=4",
        "rollout.samples=4",
        "evaluation.every=0",
        "checkpoints.best=false",
    )
    more = ("logging.episodes_every=1", "logging.episodes_problems=4")
    run("own_problems", tmp_path / "run", *[f"--config.{change}" for change in (*changes, *more)])
    groups = {}
    for path in sorted((tmp_path / "run" / "episodes").glob("step-*.parquet")):
        table = read_episodes(path)
        for row in range(len(table)):
            task, role = table.task_of(row), table.role_of(row)
            groups.setdefault((path.name, role, int(table.group[row])), set()).add(task.id)
            if role == "solver":
                assert task.gold == str(eval(task.question.removesuffix("=?")))
                assert table.grade[row] == (table.answer[row] == task.gold)
    asked = [ids for (_, role, _), ids in groups.items() if role == "solver"]
    assert asked and all(len(ids) == 1 for ids in groups.values())
    lines = list(read_lines(tmp_path / "run" / "metrics.jsonl"))
    assert all(line["reward/solver"] > 0 == line["reward"] for line in lines)


def test_a_proposer_is_paid_most_where_half_of_the_tries_are_right():
    def told(*grades):
        calls = [SimpleNamespace(role="proposer"), *[SimpleNamespace(role="solver") for _ in grades]]
        return SimpleNamespace(calls=calls, answers=[None, *grades])

    graded = [told(1, 0, 1, 0), told(1, 1, 1, 1), told(0, 0, 0, 1), told()]
    assert own_problems.learnable(graded) == [[1, 1, 0, 1, 0], [0, 1, 1, 1, 1], [0.75, 0, 0, 0, 1], [0]]
    assert (
        own_problems.longest_sum("7+4=11, 95-7-2=86") == "95-7-2"
        and own_problems.longest_sum("no sum") is None
    )
    assert own_problems.problem("95-7-2", Task("", "math", "1+1=?")).gold == "86"
    assert own_problems.problem("1+1", Task("", "math", "1+1=?")) is None


def test_a_model_directory_is_sampled_from(base, capsys):
    run("sample", base)
    answers = capsys.readouterr().out.splitlines()
    assert len(set(answers)) == 4 and all(re.match(r"(stop|length) -\d", answer) for answer in answers)


def test_losses_push_towards_what_earned_more(capsys):
    run("losses")
    advantages, loss = capsys.readouterr().out.splitlines()
    numbers = [float(number) for number in re.findall(r"-?\d+\.\d*", advantages)]
    # One of three earned 1: mean 1/3, unbiased deviation 1/sqrt(3). In the second group all earned the same.
    assert numbers == pytest.approx([2 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5, 0, 0, 0], abs=1e-4)
    gradient = [float(number) for number in re.findall(r"-?\d+\.\d*", loss.partition("by row")[2])]
    assert gradient == pytest.approx([-advantage / 6 for advantage in numbers], abs=1e-4)


def test_a_loop_of_ones_own_tells_of_every_step_and_ends_with_policies(base, capsys):
    params = own_loop.train(base, steps=2, problems=2, samples=2)
    told = capsys.readouterr().out.splitlines()
    assert [re.fullmatch(r"step (\d): [\d.]+% right, gradient norm [\d.]+", line)[1] for line in told] == [
        "1",
        "2",
    ]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


def test_the_notebook_is_the_script_cell_by_cell_and_runs_as_it_stands(capsys, monkeypatch):
    made = notebook_of((ROOT / "examples" / "own_loop.py").read_text())
    kept = json.loads((ROOT / "examples" / "own_loop.ipynb").read_text())
    assert kept == made
    monkeypatch.chdir(ROOT / "examples")  # where a notebook runs
    names = {}
    for cell in kept["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 2 and all(
        re.match(r"step \d: [\d.]+% right, gradient norm \d", line) for line in told
    )
    assert set(names["trees"]) == {"p0", "p1"}
    # 20 lines of code from the player to the weights
    assert len("".join(kept["cells"][2]["source"]).splitlines()) <= 20


def test_what_the_page_of_loops_changes_works(base, capsys):
    page = (ROOT / "docs" / "own-loop.md").read_text().partition("## To change it")[2]
    blocks = [textwrap.dedent(block) for block in re.findall(r"(?:^    .+\n)+", page, re.MULTILINE)]
    player = own_loop.player_for(own_loop.voting, base)
    table = player.play(list(own_loop.micro.take("micro_math", "train", 2)), samples=2)
    names = {**vars(own_loop), "player": player, "table": own_loop.grade(table)}
    names["my_reward"] = lambda graded: [[0.25] * len(one.calls) for one in graded]
    for block in blocks:
        exec(block.replace('"val", 64', '"val", 2').replace("samples=4", "samples=1"), names)
    assert len(blocks) == 5 and names["player"].limits.max_calls == 200
    assert (names["table"].reward == 0.25).all() and names["table"].trains.all()
    share, *words = capsys.readouterr().out.splitlines()
    assert 0 <= float(share) <= 1 and words


def test_the_compiled_step_tells_of_every_step_and_is_compiled_once(base, capsys, monkeypatch):
    made, jit = [], jax.jit
    monkeypatch.setattr(jax, "jit", lambda function, **kw: made.append(jit(function, **kw)) or made[-1])
    run("compiled_step", *[f"--config.{setting}" for setting in (*SMALL, f"policies.base={base}")])
    assert [one._cache_size() for one in made if one.__name__ == "step"] == [1]
    told = capsys.readouterr().out.splitlines()
    assert [re.fullmatch(r"(\d) reward [01]\.\d+ tokens \d+", line)[1] for line in told] == ["1", "2"]


def test_a_recipe_of_ones_own_is_trained_and_written_down(base, tmp_path, monkeypatch):
    """The page's example as it stands, two steps of it."""
    assert len((ROOT / "examples" / "own_recipe.py").read_text().splitlines()) <= 40
    few = {
        name: json.loads(text) if text[0].isdigit() else text for name, text in (s.split("=") for s in SMALL)
    }
    few |= {"evaluation.problems": 1, "data.test_size": 2, "data.train_size": 8, "policies.base": str(base)}
    few |= {"checkpoints.every": 1, "checkpoints.keep_every": 1}
    made = dataclasses.replace(own_recipe.RECIPE, config=lambda: changed(own_recipe.config(), few))
    monkeypatch.setattr(own_recipe, "RECIPE", made)
    record = recipe_run.run("examples.own_recipe", 1, tmp_path / "runs", results=tmp_path)
    assert json.loads((tmp_path / "runs" / "examples.own_recipe.json").read_text()) == record
    (found,) = record["runs"]
    assert set(found) == {"majority", "truth"} and len(found["truth"]["values"]["accuracy"]) == 2
    assert found["majority"]["sampled"] > 0 and 0 <= found["truth"]["values"]["unreadable"] <= 1


def test_training_never_reads_the_test_split(trained):
    assert set(READ) == {"train", "val"}


def test_it_trains_every_role_it_names(trained):
    program, workdir = trained
    lines = list(read_lines(workdir / "metrics.jsonl"))
    assert [line["step"] for line in lines] == [1, 2]
    assert {name.split("/")[1] for name in lines[0] if name.startswith("reward/")} == TRAINED[program]
    assert [line["split"] for line in read_lines(workdir / "eval.jsonl")] == ["val", "val"]
    assert f"examples.{program}:" in (workdir / "config.json").read_text()


def test_it_ends_with_its_report(trained):
    assert {path.name for path in trained[1].glob("report.*")} == {"report.html", "report.png", "report.svg"}


@pytest.mark.parametrize("name", ["own_workflow", "own_reward"])
def test_a_copy_of_a_program_trains_what_is_in_the_copy(base, tmp_path, name):
    copy, workdir = tmp_path / "mine.py", tmp_path / "run"
    copy.write_text((ROOT / "examples" / f"{name}.py").read_text())
    fields = [f"--config.{setting}" for setting in (*SMALL, f"policies.base={base}", "steps=1")]
    done = subprocess.run(
        [sys.executable, copy, workdir, *fields], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    config = json.loads((workdir / "config.json").read_text())["config"]
    named = config["rewards"]["name"] if name == "own_reward" else config["workflow"]["name"]
    assert named.partition(":")[0] == "mine"


def test_a_resume_would_notice_that_the_program_changed(trained):
    assert any(
        name.startswith("code of ")
        for name in json.loads((trained[1] / "config.json").read_text())["digests"]
    )


@pytest.mark.parametrize("file", ["metrics.jsonl", "eval.jsonl"])
def test_every_name_in_a_line_is_documented(trained, file):
    for line in read_lines(trained[1] / file):
        assert not undocumented(file, line)


def test_every_file_of_a_run_is_in_the_table_of_its_page(trained):
    page = (ROOT / "docs" / "run-folder.md").read_text()
    table = page[page.index("| file | what it holds |") :].partition("\n\n")[0]
    listed = {name.rstrip("/") for name in re.findall(r"`([\w./]+)`", table)}
    assert {path.name for path in trained[1].iterdir()} - {".lock"} <= listed
