"""A workflow is played without training, and everything that a role was asked and said can be read."""

import dataclasses
import json
import re

import numpy as np
import pytest
import script
from stored_run import make_base

from marl_jax.commands.rehearse import rehearse
from marl_jax.config.run_config import load_config
from marl_jax.episodes import CallRecord, Episode
from marl_jax.planning.lengths import PlanError
from marl_jax.rollouts import prompts_of, read_episodes, transcript
from marl_jax.rollouts.storage import read_extra
from marl_jax.task import Task

SMALL = {
    "data.name": "stored_run:questions",
    "engine.max_prompt": "320",
    "sampling.max_new_tokens": "8",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def config(base):
    return load_config("micro:eval_opt-isolated-xs-math", [*SMALL.items(), ("policies.base", str(base))])


def test_each_call_shows_its_prompt_its_text_and_the_grade(config):
    *episodes, total = rehearse(config, problems=2, samples=2)
    assert len(episodes) == 4
    for number, text in enumerate(episodes):
        question = f"{number // 2}*{number // 2}=?"
        assert text.startswith(
            f"task train/{number // 2}, sample {number % 2}, workflow eval_opt\n    {question}\n"
        )
        assert f"  was asked:\n    user\n    {question}\n    assistant\n  said:\n    \\boxed" in text
        assert all(len(line) <= 80 for line in text.splitlines())
        right = "\nanswer: \\boxed{1}" in text
        assert text.endswith(f"graded: {right:g}, {'right' if right else 'wrong'} (wanted: '1')\n")
        assert f"  its own answer is worth {right:g}\n" in text
    rights = sum("graded: 1, right" in text for text in episodes)
    assert total.startswith(f"{rights} of 4 episodes right, ")


def test_of_an_episode_that_forks_paths_are_right_and_shared_calls_count_once(base):
    fields = {
        **SMALL,
        "policies.base": str(base),
        "workflow.name": "examples.forks:designed",
        "policies.map": '{"orchestrator": "p0", "worker": "p0"}',
    }
    *paths, total = rehearse(load_config("micro:eval_opt-shared-xs-math", [*fields.items()]), 1, 2)
    rights = sum("graded: 1, right" in text for text in paths)
    assert len(paths) == 8 and total == f"{rights} of 8 paths right, 5.0 calls an episode"


def none_right(table):
    return np.zeros(len(table.bare_episodes))


def test_episodes_are_right_by_the_metric_of_evaluations(config):
    evaluation = dataclasses.replace(config.evaluation, metric=f"{__name__}:none_right")
    *episodes, total = rehearse(dataclasses.replace(config, evaluation=evaluation), problems=2, samples=2)
    assert all("graded: 0, wrong" in text for text in episodes) and total.startswith("0 of 4 episodes right")


def test_a_stop_token_that_the_model_lacks_is_refused_as_by_train(config):
    sampling = dataclasses.replace(config.sampling, stop_tokens=(500,))
    with pytest.raises(
        PlanError, match=r"sampling\.stop_tokens holds 500, and the model's tokens are 0\.\.\d+"
    ):
        list(rehearse(dataclasses.replace(config, sampling=sampling), problems=1, samples=1))


def test_the_command_writes_nothing_but_what_it_prints(base, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fields = [f"--config.{name}={value}" for name, value in SMALL.items()]
    asked = [
        "--config=micro:single-shared-xs-math",
        f"--config.policies.base={base}",
        *fields,
        "--problems=1",
    ]
    assert script.run("experiments.try", *asked) == 0
    out = capsys.readouterr().out
    assert "task train/0, sample 0, workflow single" in out
    assert re.match("[01] of 1 episodes right, ", out.splitlines()[-1])
    assert not [*tmp_path.iterdir()]


def test_a_later_turn_shows_what_was_added_and_control_characters_are_spelled_out():
    call = CallRecord("generator", "p0", 0, 0, (1, 2, 3), (4, 5), (0.0, 0.0), "a\x1b[2J\rb\tc", "stop", "1")
    later = CallRecord("generator", "p0", 0, 1, (1, 2, 3, 4, 5, 6), (7,), (0.0,), "d", "stop", None, after=0)
    episode = Episode(Task("t", "math", "1\x07?"), 0, "w", (call, later), "x" * 200)
    asked = prompts_of(episode, lambda tokens: " ".join(map(str, tokens)))
    assert asked == ["1 2 3", "6"]
    text = transcript(episode, asked, 80)
    assert "a\\x1b[2J\\rb\\tc" in text and "1\\x07?" in text and "\x1b" not in text and "\r" not in text


@pytest.mark.long
def test_stored_episodes_and_the_page_have_the_prompts(base, tmp_path):
    run = tmp_path / "run"
    fields = {
        **SMALL,
        "steps": 1,
        "data.problems": 2,
        "rollout.samples": 2,
        "engine.lanes": 16,
        "evaluation.every": 0,
        "checkpoints.best": "false",
    }
    texts = [f"--config.{name}={value}" for name, value in fields.items()]
    asked = [
        "--config=micro:eval_opt-shared-xs-math",
        f"--config.policies.base={base}",
        f"--workdir={run}",
        *texts,
    ]
    assert script.run("experiments.train", *asked) == 0
    (file,) = (run / "episodes").glob("*.parquet")
    table = read_episodes(file)
    words = read_extra(file)["asked"]
    assert len(words) == len(table)
    for after, said in zip(table.after.tolist(), words):
        assert ("*" in said) == (after < 0)  # the question; a later turn has what was added
        assert said.startswith("user\n") or after >= 0
    page = (run / "report.html").read_text()
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert [call["q"] for one in data["said"]["episodes"] for call in one["calls"]] == [
        said.strip() for said in words
    ]
