"""Credit on what the built-in workflows really record: their roles, readers and reads."""

from pathlib import Path

import pytest

from marl_jax.policies import shared
from marl_jax.rewards.credit import assign, by_role, own_work, voting_rubric
from marl_jax.rewards.grading import KINDS, grade_episodes
from marl_jax.rollouts import rollout
from marl_jax.rollouts.episodes import CallRecord, Episode
from marl_jax.tasks.families import grade_answer, parse
from marl_jax.tasks.task import Task
from marl_jax.workflows import BUILT_IN, Call, Completion, load_prompts

TASK = Task(id="t", family="math", question="6 times 7?", gold="42")


def play(flow, replies):
    """An episode in which every role says, call by call, what `replies` lists for it."""
    left = {role: list(texts) for role, texts in replies.items()}
    records: list[CallRecord] = []
    script, sent = flow(TASK, load_prompts("math")), None

    def answered(call):
        text = left[call.role].pop(0)
        answer = call.read(text) if call.read else parse(TASK, text)
        turn = sum(r.role == call.role and r.slot == call.slot for r in records)
        reads = tuple(read.call for read in call.reads)
        records.append(
            CallRecord(call.role, "p", call.slot, turn, (1,), (2,), (0.0,), text, "stop", answer, reads)
        )
        return Completion(text, (2,), (0.0,), "stop", answer, len(records) - 1)

    while True:
        try:
            asked = script.send(sent)
        except StopIteration as end:
            answer = end.value.answer if isinstance(end.value, Completion) else end.value
            return Episode(TASK, 0, flow.name, tuple(records), answer)
        sent = answered(asked) if isinstance(asked, Call) else [answered(call) for call in asked]


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
    (graded,) = grade_episodes([play(BUILT_IN[name], replies)], grade_answer)
    assert graded.outcome == outcome
    assert own_work(graded) == own


def test_the_log_of_recorded_episodes_has_every_component_of_every_role(monkeypatch):
    """Two samples of voting as the scheduler records them: right, wrong, silent, pick 1; then all wrong, pick 2."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "rollouts")
    from fake_engine import TOKENIZER, FakeEngine

    flow = BUILT_IN["voting"]
    said = iter([RIGHT, WRONG, SILENT, r"\boxed{1}", WRONG, WRONG, WRONG, r"\boxed{2}"])
    episodes = []
    for _ in range(2):
        episodes += rollout(
            flow, [TASK], FakeEngine(lambda prompt, request: next(said), lanes=1), TOKENIZER, shared(flow.roles),
            prompts=load_prompts("math", "micro"), parse=parse,
        )  # fmt: skip
    assert [episode.error for episode in episodes] == [None, None]
    rewards = assign(voting_rubric, grade_episodes(episodes))
    assert by_role(episodes, rewards) == {
        "generator": {"own": (0.5, 6), "final": (1.5, 6), "wrong": (-4.0, 6), "reward": (-2.0, 6)},
        "aggregator": {"pick": (1.0, 2), "reward": (1.0, 2)},
    }


def test_both_forms_of_eval_opt_are_credited_alike():
    replies = {"generator": [WRONG, RIGHT], "evaluator": [r"\boxed{Incorrect}", r"\boxed{Correct}"]}
    episodes = [play(BUILT_IN["eval_opt"].bind(shared=shared), replies) for shared in (False, True)]
    assert [own_work(graded) for graded in grade_episodes(episodes, grade_answer)] == [[0, 1, 1, 1]] * 2


def test_every_role_of_the_built_in_workflows_has_work_of_its_own():
    assert {role for flow in BUILT_IN.values() for role in flow.roles} <= set(KINDS)
