"""Credit on what the built-in workflows really record: their roles, readers and reads."""

import dataclasses
from pathlib import Path

import driven
import numpy as np
import pytest

from marl_jax.episodes import CallRecord, Episode
from marl_jax.policies import shared
from marl_jax.rewards.credit import own_work, voting_rubric, with_rewards
from marl_jax.rewards.families import grade_answer, parse
from marl_jax.rewards.grading import grade
from marl_jax.rollouts import rollout
from marl_jax.table import Table
from marl_jax.task import Task
from marl_jax.workflows import BUILT_IN, load_prompts

TASK = Task(id="t", family="math", question="6 times 7?", gold="42")


def play(flow, replies):
    """An episode in which every role says, call by call, what `replies` lists for it."""
    left = {role: iter(texts) for role, texts in replies.items()}
    records: list[CallRecord] = []

    def say(call, before):
        text = next(left[call.role])
        answer = call.read(text) if call.read else parse(TASK, text)
        turn = sum(r.role == call.role and r.slot == call.slot for r in records)
        reads = tuple(read.call for read in call.reads)
        record = CallRecord(call.role, "p", call.slot, turn, (1,), (2,), (0.0,), text, "stop", answer, reads)
        records.append(dataclasses.replace(record, kind=flow.kind_of(call.role)))
        return text

    _, end = driven.drive(flow(TASK, load_prompts("math")), say)
    return Episode(TASK, 0, flow.name, tuple(records), end.answer)


def worked(table):
    """What the own work of every call is worth; None where there was nothing to get right."""
    value, known = own_work(table)
    return np.where(known, value, None).tolist()


RIGHT, WRONG, SILENT = r"so \boxed{42}", r"so \boxed{41}", "well"


@pytest.mark.parametrize(
    ("name", "replies", "outcome", "own"),
    [
        ("single", {"generator": [RIGHT]}, 1, [1]),
        ("voting", {"generator": [WRONG, RIGHT, SILENT], "aggregator": [r"\boxed{2}"]}, 1, [0, 1, 0, 1]),
        ("voting", {"generator": [WRONG, RIGHT, RIGHT], "aggregator": ["hm"]}, 0, [0, 1, 1, 0]),
        ("voting", {"generator": [WRONG, SILENT, WRONG], "aggregator": ["3"]}, 0, [0, 0, 0, None]),
        (
            "eval_opt",
            {"generator": [WRONG, RIGHT], "evaluator": [r"\boxed{Incorrect}", r"\boxed{\text{Correct}}"]},
            1,
            [0, 1, 1, 1],
        ),
        ("eval_opt", {"generator": [WRONG], "evaluator": [r"\boxed{Correct}"]}, 0, [0, 0]),
        (
            "orch_workers",
            {
                "orchestrator": ["STRATEGY 1: a\nSTRATEGY 2: b"],
                "worker": [RIGHT, WRONG],
                "synthesizer": [RIGHT],
            },
            1,
            [0.5, 1, 0, 1],
        ),
        ("orch_workers", {"orchestrator": ["?"], "worker": [RIGHT], "synthesizer": [WRONG]}, 0, [0, 1, 0]),
        ("debate", {"debater": [RIGHT, WRONG, WRONG, RIGHT, RIGHT, WRONG]}, 1, [1, 0, 0, 1, 1, 0]),
    ],
)
def test_the_own_work_of_every_role(name, replies, outcome, own):
    table = grade(Table.of([play(BUILT_IN[name], replies)]), grade_answer)
    assert table.bare_episodes[0].outcome == outcome
    assert worked(table) == own


def test_recorded_episodes_have_every_component_of_every_role(monkeypatch):
    """Two samples of voting as the scheduler records them: right, wrong, silent, pick 1; then all wrong, pick 2."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "rollouts")
    from fake_engine import TOKENIZER, FakeEngine

    flow = BUILT_IN["voting"]
    said = iter([RIGHT, WRONG, SILENT, r"\boxed{1}", WRONG, WRONG, WRONG, r"\boxed{2}"])
    table = Table.concat([
        rollout(
            flow, [TASK], FakeEngine(lambda prompt, request: next(said), lanes=1), TOKENIZER, shared(flow.roles),
            prompts=load_prompts("math", "micro"), parse=parse,
        )
        for _ in range(2)
    ])  # fmt: skip
    assert [head.error for head in table.bare_episodes] == [None, None]
    table = with_rewards(grade(table), voting_rubric)
    assert table.reward.tolist() == [1.0, -0.5, 0.5, 1.0, -1.0, -1.0, -1.0, 0.0]
    components = {name: np.nansum(column) for name, column in table.components.items()}
    assert components == {"own": 0.5, "final": 1.5, "wrong": -4.0, "pick": 1.0}
    for name, column in table.components.items():
        assert (np.isnan(column) == table.having(role="generator" if name == "pick" else "aggregator")).all()


def test_both_forms_of_eval_opt_are_credited_alike():
    replies = {"generator": [WRONG, RIGHT], "evaluator": [r"\boxed{Incorrect}", r"\boxed{Correct}"]}
    for one_history in (False, True):
        one = play(BUILT_IN["eval_opt"].bind(shared=one_history), replies)
        assert worked(grade(Table.of([one]), grade_answer)) == [0, 1, 1, 1]


def test_every_role_of_the_built_in_workflows_is_declared_with_its_work():
    for flow in BUILT_IN.values():
        assert tuple(flow.kinds) == flow.roles
