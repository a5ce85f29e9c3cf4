"""What the page shows of recorded episodes: all that was said and earned, and who lost what was right."""

import dataclasses
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from study_folders import RIGHT, WRONG, call, episode, table_of, write_lines, write_run

from marl_jax.rollouts import ToolRecord, write_episodes
from marl_jax.study.page_episodes import inert, lost_by, recorded
from marl_jax.study.record import read_run
from marl_jax.task import Task

OLD_EPISODES = Path(__file__).parents[1] / "fixtures" / "episodes"


def said(folder, **more):
    return recorded(read_run(folder), **more)


def test_every_episode_is_there_with_what_its_calls_earned(tmp_path):
    wrong = episode(answer="45", texts=("12+34 is \\boxed{45}", "no idea", "hm \\boxed{45}"))
    found = said(
        write_run(
            tmp_path / "run", episodes={10: [(wrong, WRONG), (episode(), RIGHT)], 2: [(episode(), RIGHT)]}
        )
    )
    assert found.files == [{"kind": "training", "step": 2}, {"kind": "training", "step": 10}]
    assert [(one["f"], one["o"], one["a"]) for one in found.episodes] == [
        (0, 1, "46"),
        (1, 0, "45"),
        (1, 1, "46"),
    ]
    assert [(task["id"], task["question"], task["gold"]) for task in found.tasks] == [("t1", "12+34=?", "46")]
    calls = found.episodes[1]["calls"]
    assert [one["r"] for one in calls] == ["generator"] * 3 + ["aggregator"]
    assert [one["w"] for one in calls] == [0, -1, 0, -1] and calls[0]["v"] == -0.9
    assert calls[3]["d"] == [0, 1, 2]
    assert "v" not in found.episodes[0]["calls"][3]  # it was not trained


def test_episodes_without_rewards_have_none(tmp_path):
    (one,) = said(write_run(tmp_path / "run", episodes={1: [(episode(), None)]})).episodes
    assert "o" not in one and not {"w", "v"} & set(one["calls"][0])


def test_episodes_that_cannot_be_read_are_named_and_the_others_shown(tmp_path):
    folder = write_run(tmp_path / "run", episodes={1: [(episode(), RIGHT)], 9: [(episode(), RIGHT)]})
    (folder / "episodes" / "step-000009.parquet").write_bytes(b"no parquet")
    found = said(folder)
    assert [file["step"] for file in found.files] == [1]
    assert len(found.unread) == 1 and "step-000009.parquet' cannot be read as episodes" in found.unread[0]


def test_episodes_of_an_earlier_version_are_shown_with_their_rewards(tmp_path):
    folder = write_run(tmp_path / "run")
    shutil.copytree(OLD_EPISODES, folder / "episodes")
    found = said(folder)
    earned = [(one["o"], [call["w"] for call in one["calls"]]) for one in found.episodes]
    assert (1.0, [1.0, 0.75]) in earned and (0.0, [0.0, 0.0]) in earned and found.unread == []
    write_lines(folder / "episodes" / "step-000004.rewards.jsonl", [RIGHT, RIGHT])
    found = said(folder)
    assert found.episodes == [] and "it has 2 lines for 3 episodes" in found.unread[0]


def test_evaluations_of_the_run_and_of_the_command_are_told_apart(tmp_path):
    folder = write_run(tmp_path / "run")
    for name in ("val-000010", "test-000010-trained-0123abcd", "step-000010"):
        write_episodes(folder / "episodes" / f"{name}.parquet", table_of([(episode(), RIGHT)]))
    (folder / "episodes" / "notes.txt").write_text("mine")
    kinds = [(file["kind"], file["step"]) for file in said(folder).files]
    # A page begins with what was trained on.
    assert kinds == [("training", 10), ("test trained", 10), ("val", 10)]


def test_problems_of_two_splits_that_have_an_id_in_common_have_their_own_questions(tmp_path):
    folder = write_run(tmp_path / "run", episodes={1: [(episode("1+1=?"), RIGHT)]})
    write_episodes(folder / "episodes/val-000000.parquet", table_of([(episode("2+2=?"), RIGHT)]))
    found = said(folder)
    asked = [found.tasks[one["t"]]["question"] for one in found.episodes]
    assert asked == ["1+1=?", "2+2=?"]


def test_evaluations_by_other_noise_or_another_cast_are_of_other_kinds(tmp_path):
    """The same step of one kind is the same problem again, and only the weights differ."""
    records = {
        "test-000010-trained-00000001": {"seed": 7},  # that of the run
        "test-000010-trained-00000002": {"seed": 8},
        "test-000010-single_transfer-00000003": {"seed": 7, "role": "voter"},
    }
    lines = [{"step": 10, "episodes": f"episodes/{name}.parquet", **told} for name, told in records.items()]
    folder = write_run(tmp_path / "run", evaluations=lines)
    for name in records:
        write_episodes(folder / "episodes" / f"{name}.parquet", table_of([(episode(), RIGHT)]))
    kinds = [file["kind"] for file in said(folder).files]
    assert kinds == ["test single_transfer voter", "test trained", "test trained noise 8"]


def test_of_what_does_not_fit_every_other_file_is_left_out_and_the_ends_stay(tmp_path):
    folder = write_run(tmp_path / "run", episodes={step: [(episode(), RIGHT)] for step in range(1, 11)})
    one = len(str(said(folder).episodes[0]))
    found = said(folder, budget=5 * one)
    steps = [file["step"] for file in found.files]
    assert steps[0] == 1 and steps[-1] == 10 and len(steps) + found.left_out == 10 and 2 <= len(steps) <= 5
    assert len(said(folder, budget=0).files) == 2


@pytest.mark.parametrize("problems", [1, 8])
def test_of_files_that_alone_do_not_fit_the_last_problems_are_left_out_then_episodes(tmp_path, problems):
    signs = "<" * 500  # six bytes each on a page
    tasks = [Task(f"t{k}", "math", "1+1=?", gold="2") for k in range(problems)]
    played = [(replace(episode(texts=(signs,)), task=tasks[k * problems // 40]), RIGHT) for k in range(40)]
    folder = write_run(tmp_path / "run", episodes=dict.fromkeys((1, 2, 3), played))
    found = said(folder, budget=60_000)
    assert len(inert(dataclasses.asdict(found))) < 60_000 and [file["step"] for file in found.files] == [1, 3]
    there = [len([one for one in found.episodes if one["f"] == file]) for file in (0, 1)]
    assert there == ([9, 9] if problems == 1 else [5, 5]) and found.fewer == 80 - sum(there)
    assert found.left_out == 1


def test_tools_long_texts_and_odd_tasks_are_kept_in_their_places(tmp_path):
    tools = (ToolRecord("search", {"after": 1}, None, 1), ToolRecord("late", None, "no time", 9))
    long = "begin " + "x" * 50_000 + " end"
    odd = replace(episode(texts=(long,)), tools=tools, task=Task("t1", "math", None, gold=46))
    found = said(write_run(tmp_path / "run", episodes={1: [(odd, RIGHT)]}))
    (one,) = found.episodes
    assert [(tool["r"], tool["x"], tool["at"]) for tool in one["tools"]] == [
        ("search", "{'after': 1}", 1), ("late", "error: no time", 9),
    ]  # fmt: skip
    text = one["calls"][0]["x"]
    assert text.startswith("begin") and "44,010 characters left out" in text and text.endswith("end")
    assert found.tasks[0]["question"] == "(nothing)" and found.tasks[0]["gold"] == "46"


def test_tokens_are_told_apart_where_it_is_known_where_they_end(tmp_path):
    folder = write_run(tmp_path / "run")
    table = table_of([(episode(), RIGHT)])
    words = ["twelve ", "\ufffd", "\u00e9 ", "is", "", "", ""]

    def decode(tokens):
        """A character of two tokens: the first of them alone is half of it."""
        return "".join(words[token % 7] for token in tokens).replace("\ufffd\u00e9", "\u00e9")

    trainer = [table.logprobs[row] + 0.25 for row in range(len(table))]
    write_episodes(folder / "episodes" / "step-000001.parquet", table, decode, trainer)
    (one,) = said(folder).episodes
    assert one["calls"][0]["m"] == [0.25] * one["calls"][0]["z"]
    assert one["calls"][0]["n"] == np.cumsum([7, 0, 2, 2, 0, 0, 0][: one["calls"][0]["z"]]).tolist()
    assert all(value == -0.5 for value in one["calls"][0]["l"])


def test_a_completion_of_its_end_token_alone_has_a_text_and_no_tokens_to_shade(tmp_path):
    folder = write_run(tmp_path / "run")
    table = table_of([(episode(texts=("", "46", "46")), RIGHT)])
    write_episodes(folder / "episodes" / "step-000001.parquet", table, lambda tokens: "")
    (one,) = said(folder).episodes
    assert one["calls"][0]["x"] == "(nothing)" and "n" not in one["calls"][0]


GRADED = {"right": 1.0, "wrong": 0.0}


@pytest.mark.parametrize(
    ("own", "reads", "outcome", "loser"),
    [
        (("right", "wrong"), (0, 1), 0.0, "aggregator"),
        (("right", "wrong"), (1,), 0.0, "nobody"),
        (("wrong", "wrong"), (0, 1), 0.0, ""),
        (("right", "right"), (0, 1), 1.0, ""),
        (("right", "wrong"), (0, 1), None, ""),
    ],
)
def test_a_right_candidate_is_lost_by_the_first_that_read_it(own, reads, outcome, loser):
    calls = [call("generator", name, slot) for slot, name in enumerate(own)]
    calls.append(call("aggregator", "2", reads=reads))
    answers = (*map(GRADED.get, own), None)
    assert lost_by(replace(episode(), calls=tuple(calls), answers=answers, outcome=outcome)) == loser
