"""Transcripts are what the scheduler would have made of the same words, by roles that are right often, not always."""

import itertools
import random
import types

import numpy as np
import pytest

from marl_jax.models.tokenizer import END, build_micro_tokenizer
from marl_jax.policies import shared
from marl_jax.pretraining.roles import Skill, is_right, run_scripted
from marl_jax.pretraining.transcripts import episodes, flows, histories, play, rows
from marl_jax.rewards.families import grade, parse
from marl_jax.rollouts import Chat, rollout
from marl_jax.tasks import micro
from marl_jax.workflows import BUILT_IN, load_prompts
from marl_jax.workflows.self_refine import run_public_tests

TOKENIZER = build_micro_tokenizer()
CHAT = Chat(TOKENIZER)
END_ID = TOKENIZER.convert_tokens_to_ids(END)
LEVELS = {"micro_math": (1, 2, 3), "micro_code": (1, 2, 3)}  # more than the recipes take


@pytest.fixture(scope="module")
def played():
    return list(itertools.islice(episodes(TOKENIZER, levels=LEVELS), 600))


def tasks(kind, count):
    return list(itertools.islice(micro.stream(kind, "train", seed=7), count))


# ---------------------------------------------------------------- the road of a run


class Parrot:
    """An engine that says what was said in a recorded episode, call by call."""

    def __init__(self, episode):
        self.said, self.queue, self.prompts = episode.calls, [], {}

    @property
    def pending(self):
        return len(self.queue)

    def abandon(self):
        self.queue = []

    def submit(self, request):
        index = request.key[-1]  # of the call in its episode
        self.queue.append(index)
        self.prompts[index] = request.tokens
        return index

    def step(self):
        indices, self.queue = self.queue, []
        said = lambda call: types.SimpleNamespace(
            tokens=call.tokens, logprobs=call.logprobs, finish_reason="stop"
        )
        return [(index, said(self.said[index])) for index in indices]


FLOWS = [(family, name) for family in ("math", "code") for name in flows(family)]


@pytest.mark.parametrize("family, name", FLOWS)
def test_prompts_are_those_that_the_scheduler_builds_from_the_same_words(family, name):
    flow, prompts, rng = flows(family)[name], load_prompts(family, "micro"), random.Random(3)
    for task in tasks(f"micro_{family}", 6):
        episode = play(task, flow, prompts, CHAT, rng, Skill())
        parrot = Parrot(episode)
        table = rollout(flow, [task], parrot, TOKENIZER, shared(flow.roles), prompts=prompts, parse=parse)
        (again,) = table.episodes()
        assert again.error is None
        assert [parrot.prompts[i] for i in range(len(parrot.prompts))] == [
            c.prompt_tokens for c in episode.calls
        ]
        assert again.answer == episode.answer


def test_a_row_is_a_whole_history_and_marks_what_its_roles_said(played):
    turns = set()
    for episode in played:
        ends = {call.after for call in episode.calls}
        for row in histories(episode):
            last = next(
                call for i, call in enumerate(episode.calls)
                if i not in ends and call.prompt_tokens + call.tokens == tuple(row.tokens)
            )  # fmt: skip
            chain = [last]
            while chain[0].after is not None:
                chain.insert(0, episode.calls[chain[0].after])
            sampled = [token for call in chain for token in call.tokens]
            assert row.tokens[row.sampled].tolist() == sampled
            assert not row.sampled[: len(chain[0].prompt_tokens)].any()
            assert sampled.count(END_ID) == len(chain)
            turns.add((episode.workflow, last.role, len(chain)))
    assert {("eval_opt", "generator", 3), ("eval_opt", "evaluator", 3), ("debate", "debater", 2)} <= turns


def test_of_parallel_calls_the_first_is_a_row(played):
    made = {name: next(e for e in played if e.workflow == name) for name in ("voting", "debate")}
    assert len(made["voting"].calls) == 4 and len(histories(made["voting"])) == 2
    assert len(made["debate"].calls) == 6 and len(histories(made["debate"])) == 1


# ---------------------------------------------------------------- who is heard


def test_every_role_of_every_workflow_is_heard_on_every_family_it_is_for(played):
    heard = {(e.workflow, e.task.family, call.role) for e in played for call in e.calls}
    declared = {
        (flow.name, family, role)
        for flow in BUILT_IN.values()
        for family in flow.families
        for role in flow.roles
    }
    assert heard == declared


def test_held_out_problems_never_appear(played):
    keys = {
        micro.KINDS[kind].key(episode.task)
        for episode in played
        for kind in LEVELS
        if episode.task.id.startswith(kind)
    }
    assert set(map(micro.split_of, keys)) == {"train"}
    held = {
        task.question for kind in LEVELS for split in ("val", "test") for task in micro.take(kind, split, 200)
    }
    assert not held & {episode.task.question for episode in played}


def test_the_seed_decides_all():
    first = lambda seed: [
        row.tokens.tobytes() for row in itertools.islice(rows(TOKENIZER, seed=seed, levels=LEVELS), 50)
    ]
    assert first(1) == first(1) != first(2)


# ---------------------------------------------------------------- what they say


SOLVERS = ("generator", "worker", "debater")


def test_scripted_answers_are_right_exactly_where_the_grader_says_so(played):
    answers = {
        (e.task.question, c.text): (e.task, c.text) for e in played[:60] for c in e.calls if c.role in SOLVERS
    }
    marks = [is_right(task, text) for task, text in answers.values()]
    assert marks == [grade(task, text) == 1.0 for task, text in answers.values()]
    assert 0.25 < np.mean(marks) < 0.75  # of the distinct texts: right ones repeat


def test_scripted_programs_fail_as_the_sandbox_says():
    for task in tasks("micro_code", 12):
        for text in (micro.solution(task), micro.mistake(task, 0)):
            scripted, real = run_scripted(task, text), run_public_tests(task, text)
            assert scripted["passed"] == real["passed"]
            assert scripted["passed"] or scripted["reason"] == real["reason"]


def test_verdicts_are_mostly_right_and_critiques_name_a_step_but_no_value(played):
    right, critiques = [], []
    for episode in played:
        for call in (call for call in episode.calls if call.role == "evaluator"):
            draft = episode.calls[call.reads[0]].text
            right.append((call.answer == "Correct") == is_right(episode.task, draft))
            if call.answer == "Incorrect":
                place = call.text.removeprefix("check ").removesuffix(", \\boxed{Incorrect}")
                said = place == "answer" or (place + "=" in draft if "line" not in place else "def" in draft)
                critiques.append(said and "=" not in call.text)
            else:
                assert call.text == "\\boxed{Correct}"
    assert 0.75 < np.mean(right) < 0.95 and critiques and all(critiques)


def test_an_aggregator_picks_a_right_candidate_mostly_where_there_is_one(played):
    picks = []
    for episode in played:
        if episode.workflow == "voting":
            marks = [is_right(episode.task, call.text) for call in episode.calls[:3]]
            if 0 < sum(marks) < 3:
                picks.append(marks[int(episode.calls[3].answer) - 1])
    assert 0.65 < np.mean(picks) < 0.98


def test_answers_after_criticism_are_right_more_often_than_the_first():
    rng, prompts = random.Random(0), load_prompts("math", "micro")
    flow = flows("math")["eval_opt"]
    first, later = [], []
    for task in tasks("micro_math", 300):
        drafts = [c for c in play(task, flow, prompts, CHAT, rng, Skill()).calls if c.role == "generator"]
        first.append(is_right(task, drafts[0].text))
        later += [is_right(task, draft.text) for draft in drafts[1:]]
    assert np.mean(later) > max(np.mean(first), 0.5)
