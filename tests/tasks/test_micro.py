"""The procedural problems: right, disjoint, unlimited, and wrong where they should be."""

import itertools
import re
from collections import Counter

import pytest

from marl_jax.models.tokenizer import build_micro_tokenizer
from marl_jax.rewards.families import grade, parse
from marl_jax.task import Task
from marl_jax.tasks import load, micro, micro_code, micro_math

KINDS = tuple(micro.KINDS)
LEVELS = (1, 2, 3, 4, 5)


def some(kind, split="train", count=200, levels=LEVELS, seed=0):
    return list(itertools.islice(micro.stream(kind, split, seed=seed, levels=levels), count))


def run(response, test):
    """What a program of ours returns (only ever run on programs written by `micro_code`)."""
    scope: dict = {}
    exec(response.removeprefix("```python\n").removesuffix("\n```"), scope)
    try:
        return scope["f"](*test["args"])
    except (IndexError, ValueError, TypeError, ZeroDivisionError) as error:
        return repr(error)


def passes(task, response):
    return all(run(response, test) == test["expected"] for test in task.tests)


def value(question):
    """The answer by Python's own arithmetic: of an equation by trying every number."""
    if "x" in question:
        left, right = question.removesuffix(", x=?").split("=")
        left = re.sub(r"(\d)x", r"\1*x", left)
        (root,) = [x for x in range(-500, 501) if eval(left, {"x": x}) == int(right)]
        return root
    return eval(question.removesuffix("=?"))


def test_math_gold_is_what_python_computes():
    for task in some("micro_math", count=500):
        assert int(task.gold) == value(task.question), task


def test_the_examples_of_two_levels_by_hand():
    assert micro_math._task(1, "add", 37, 48).gold == "85"
    assert micro_math._task(1, "add", 37, 48).question == "37+48=?"
    assert micro.solution(micro_math._task(1, "add", 37, 48)) == "7+8=15, 3+4+1=8, \\boxed{85}"
    assert micro.solution(micro_math._task(1, "add", 37, 48), "parts") == "37+40=77, 77+8=85, \\boxed{85}"
    assert micro.solution(micro_math._task(2, "sub", 37, 52)) == "12-7=5, 4-3=1, \\boxed{-15}"
    assert micro.solution(micro_math._task(5, "line", 3, 5, 26)) == "3x=26-5=21, x=21/3=7, \\boxed{7}"


@pytest.mark.parametrize("strategy", micro_math.STRATEGIES)
def test_every_line_of_a_worked_answer_is_true(strategy):
    for task in some("micro_math", count=300):
        *lines, box = micro.solution(task, strategy).split(", ")
        assert box == f"\\boxed{{{task.gold}}}"
        for line in lines:
            *_, left, right = line.split("=")
            assert eval(left) == int(right) or left.endswith("x"), (task, line)


@pytest.mark.parametrize("strategy", micro_code.STRATEGIES)
def test_every_worked_program_passes_all_its_tests(strategy):
    for task in some("micro_code", count=300):
        response = micro.solution(task, strategy)
        assert passes(task, response), (task, response)
        assert all(run(response, test) == test["expected"] for test in task.public_tests)


def test_a_mistake_is_wrong_readable_and_reproducible():
    for task in some("micro_math", count=300):
        wrong = micro.mistake(task, 5)
        assert grade(task, wrong) == 0.0 and parse(task, wrong) is not None
        assert grade(task, micro.solution(task)) == 1.0
        assert wrong == micro.mistake(task, 5)
    for task in some("micro_code", count=300):
        wrong = micro.mistake(task, 5)
        assert not passes(task, wrong) and parse(task, wrong) is not None
        assert wrong == micro.mistake(task, 5)


def test_mistakes_vary_so_that_a_vote_can_mend_them():
    for kind in KINDS:
        shares = []
        for task in some(kind, count=60):
            answers = Counter(parse(task, micro.mistake(task, seed)) for seed in range(12))
            shares.append(max(answers.values()) / 12)
        assert sum(shares) / len(shares) < 0.6, "wrong answers agree with each other"


@pytest.mark.parametrize("kind", KINDS)
def test_no_problem_is_in_two_splits_whatever_the_seed_and_level(kind):
    keys = {}
    for split in ("train", "val", "test"):
        tasks = [task for seed in range(3) for task in some(kind, split, 400, seed=seed)]
        keys[split] = {micro.KINDS[kind].key(task) for task in tasks}
        assert set(map(micro.split_of, keys[split])) == {split}
    assert (
        not keys["train"] & keys["val"]
        and not keys["train"] & keys["test"]
        and not keys["val"] & keys["test"]
    )


def test_the_same_problem_in_other_words_has_the_same_key():
    assert micro_math.key(micro_math._task(1, "add", 37, 48)) == micro_math.key(
        micro_math._task(2, "add", 48, 37)
    )
    assert micro_math.key(micro_math._task(1, "sub", 48, 37)) != micro_math.key(
        micro_math._task(1, "sub", 37, 48)
    )
    same = [
        Task("micro_code/x", "code", "", meta={"chain": chain})
        for chain in ([["add", 5]], [["add", 2], ["add", 3]])
    ]
    assert micro_code.key(same[0]) == micro_code.key(same[1])
    told = Task("micro_code/x", "code", "", meta={"chain": [["sort", None]]})
    assert micro.split_of(micro_code.key(told)) == "train", (
        "a word of the language is taught, never tested unseen"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_streams_are_seeded_and_without_end(kind):
    assert some(kind, seed=1) == some(kind, seed=1) != some(kind, seed=2)
    assert len(some(kind, "test", 3000, levels=(1,))) == 3000


@pytest.mark.parametrize("kind", KINDS)
def test_a_problem_is_the_same_whichever_stream_it_comes_from(kind):
    seen = {}
    for task in (task for seed in range(4) for task in some(kind, "test", 500, seed=seed)):
        assert seen.setdefault(task.id, task) == task
    assert len(seen) < 2000, "no problem came up twice: nothing was compared"


@pytest.mark.parametrize("kind", KINDS)
def test_levels_share_the_stream_and_the_data_set_repeats_nothing(kind, tmp_path):
    assert set(Counter(task.level for task in some(kind, count=500)).values()) == {100}
    tasks = list(load(kind, split="test", size=300, levels=LEVELS, cache=tmp_path))
    assert len({task.id for task in tasks}) == 300
    assert tasks == list(micro.take(kind, "test", 300, levels=LEVELS))


def test_every_constant_free_word_of_the_language_is_in_the_training_data():
    words = {name for name, (_, _, constants) in micro_code._TABLE.items() if constants is None}
    drawn = {step[0] for task in some("micro_code", count=2000) for step in task.meta["chain"]}
    assert words <= drawn


@pytest.mark.parametrize(
    "kind, levels, question, answer",
    [
        ("micro_math", (1, 2, 3), 16, 60),
        ("micro_math", LEVELS, 20, 75),
        ("micro_code", (1, 2, 3), 80, 50),
        ("micro_code", LEVELS, 90, 90),
    ],
)
def test_problems_and_answers_take_some_tens_of_tokens(kind, levels, question, answer):
    tokenizer = build_micro_tokenizer()
    for task in some(kind, count=300, levels=levels):
        assert len(tokenizer(task.question)["input_ids"]) <= question
        assert len(tokenizer(micro.solution(task))["input_ids"]) <= answer
        assert tokenizer.unk_token_id not in tokenizer(task.question + micro.solution(task))["input_ids"]


def test_no_constant_function_passes_a_code_problem():
    for task in some("micro_code", count=500):
        assert len({str(test["expected"]) for test in task.tests}) > 2
        assert len(task.tests) == micro_code.TESTS and len(task.public_tests) >= 2


def test_worked_answers_exist_for_micro_tasks_only():
    with pytest.raises(ValueError, match="task 'gsm8k/train/0' is no micro task"):
        micro.solution(Task("gsm8k/train/0", "math", "1?", gold="1"))
