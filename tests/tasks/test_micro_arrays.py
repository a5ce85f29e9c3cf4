"""The array road and the text road give the same rewards."""

import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_jax.learning.advantages import group_advantages
from marl_jax.models.tokenizer import build_micro_tokenizer
from marl_jax.rewards.math import grade_math
from marl_jax.rewards.math.boxed import extract_boxed
from marl_jax.tasks import micro
from marl_jax.tasks.micro_arrays import (
    char_table,
    grade_tokens,
    integer,
    last_box,
    spell,
)

TOKENIZER = build_micro_tokenizer()
TABLE = char_table([TOKENIZER.decode([i], skip_special_tokens=True) for i in range(len(TOKENIZER))])
GRADE = jax.jit(grade_tokens)


def rows(texts, width):
    """Token ids and mask of texts, padded with a token that would spell something."""
    tokens = np.full((len(texts), width), TOKENIZER("7")["input_ids"][0], np.int32)
    mask = np.zeros((len(texts), width), bool)
    for i, text in enumerate(texts):
        ids = TOKENIZER(text)["input_ids"]
        tokens[i, : len(ids)], mask[i, : len(ids)] = ids, True
    return tokens, mask


def by_arrays(responses, golds):
    width = max(len(TOKENIZER(text)["input_ids"]) for text in responses)
    width += -width % 32
    return np.asarray(GRADE(*rows(responses, width), *rows(golds, 24), TABLE))


def by_text(responses, golds):
    return np.array([grade_math(response, gold) for response, gold in zip(responses, golds)], np.float32)


def test_tokens_spell_what_the_tokenizer_decodes():
    texts = ["37+48=?", "so \\boxed{-85}", "```python\ndef f(x):\n    return x\n```"]
    chars = np.asarray(spell(*rows(texts, 64), TABLE))
    assert [bytes(c for c in row if c).decode() for row in chars] == texts


def test_control_tokens_spell_nothing():
    end = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    tokens, mask = rows(["\\boxed85"], 16)
    tokens[0, mask.sum()], mask[0, mask.sum()] = end, True
    assert GRADE(tokens, mask, *rows(["85"], 24), TABLE).tolist() == [1.0]


def test_worked_answers_and_mistakes_of_the_micro_tasks():
    tasks = list(micro.take("micro_math", "train", 300, levels=(1, 2, 3, 4, 5)))
    responses = [micro.solution(task) for task in tasks] + [micro.mistake(task, 0) for task in tasks]
    golds = 2 * [task.gold for task in tasks]
    assert by_arrays(responses, golds).tolist() == [1.0] * 300 + [0.0] * 300
    assert np.array_equal(by_arrays(responses, golds), by_text(responses, golds))


@pytest.mark.parametrize(
    "response, gold",
    [
        ("\\boxed{85}", "85"),
        ("\\boxed{-85}", "85"),
        ("\\boxed{ - 085 .}", "-85"),
        ("\\boxed{+7}", "7"),
        ("\\boxed{--7}", "7"),
        ("\\boxed{-0}", "0"),
        ("\\boxed{8 5}", "85"),
        ("\\boxed{}", "0"),
        ("\\boxed{-}", "0"),
        ("85", "85"),
        ("\\boxed{3} then \\boxed{85}", "85"),
        ("\\boxed{85} then \\boxed{3}", "85"),
        ("\\boxed{85} then \\boxed{3", "85"),
        ("\\boxed{85", "85"),
        ("\\boxed{85}}", "85"),
        ("\\boxed{{85}}", "85"),
        ("\\boxed{\\boxed{85}}", "85"),
        ("\\boxed{ \\boxed85 }", "85"),
        ("\\boxed{1 \\boxed{85}}", "85"),
        ("\\boxed{1 \\boxed{85}", "85"),
        ("\\boxed 85, done", "85"),
        ("\\boxed85}", "85"),
        ("\\boxedx 85", "85"),
        ("\\boxed{85x}", "85"),
        ("\\boxed{8+5}", "13"),
        ("\\boxed{999999999}", "999999999"),
        ("\\boxed{-999999999}", "-999999999"),
        ("\\boxed{4294967301}", "5"),  # 2**32 + 5
        ("\\boxed{18446744073709551621}", "5"),
        ("\\boxed{00000000000000000005}", "5"),
    ],
)
def test_single_answers(response, gold):
    assert by_arrays([response], [gold])[0] == grade_math(response, gold)


@pytest.mark.parametrize("box", ["7.0", "14/2", "3+4-0", "x=7", "7 apples", "(7)", "\\,7", "7\\%"])
def test_an_integer_that_is_not_written_as_one_earns_nothing(box):
    assert by_arrays([f"\\boxed{{{box}}}", f"\\boxed{{{box}}}"], ["7", "8"]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "box", ["7", "+7", "--7", "- -7", "007", " 7 ", "$7$", "{7}", "7.", "7,", "7;", "7:", "-{-7}"]
)
def test_an_integer_that_is_written_as_one_is_read_on_both_roads(box):
    response = f"\\boxed{{{box}}}"
    assert by_arrays([response], ["7"]).tolist() == [grade_math(response, "7")] == [1.0]


PIECES = [
    "\\boxed",
    "\\boxed{",
    "\\boxed{",
    "\\boxed{7}",
    "{",
    "}",
    "}",
    "7",
    "-",
    "+",
    "0",
    " ",
    "\n",
    "x",
    ".",
    "12",
]
# What the arrays do not read, as their docstring says: commands and braces in an argument without braces, and
# other ways to write an integer (7.0, a product of boxes).
OUTSIDE = re.compile(r"\\boxed(?![A-Za-z])\s*(\\|[^\s{}\\][^\s}]*[\\{])|\d\.\d")


@pytest.mark.parametrize("seed", range(4))
def test_any_soup_of_boxes_braces_and_digits(seed):
    rng = random.Random(seed)
    soups = ("".join(rng.choices(PIECES, k=rng.randrange(1, 14))) for _ in range(3000))
    texts = [s for s in soups if not OUTSIDE.search(s) and "\\boxed" not in (extract_boxed(s) or "")]
    assert len(texts) > 2000
    golds = [rng.choice(("7", "-7", "77", "12")) for _ in texts]
    expected = by_text(texts, golds)
    assert 0.05 < expected.mean() < 0.5
    different = np.flatnonzero(by_arrays(texts, golds) != expected)
    assert not different.size, [(texts[i], golds[i]) for i in different[:5]]


def test_the_box_that_is_read_is_the_one_of_the_text_road():
    texts = [
        "a \\boxed{1} \\boxed{2 {3} x}",
        "\\boxed{1} \\boxed{2",
        "\\boxed{\\{7} ",
        "none",
        "\\boxed{ \\boxed{4} }",
    ]
    chars = np.asarray(spell(*rows(texts, 48), TABLE))
    start, end = jax.vmap(last_box)(chars)
    read = [bytes(c for c in row[a:b] if c).decode().strip() or None for row, a, b in zip(chars, start, end)]
    assert read == [extract_boxed(text) for text in texts] == ["2 {3} x", "1", "\\{7", None, "4"]


def test_integers_are_read_by_value():
    parse = jax.jit(integer)

    def read(text):
        chars = np.zeros(16, np.uint8)
        chars[1 : len(text) + 1] = list(text.encode())
        value, sound = parse(chars, 0, 16)
        return int(value) if sound else None

    assert [read(t) for t in ("42", " -007 ", "+5.", "1 2", "", "-", "1-2", "x", "1234567890")] == [
        *(42, -7, 5),
        *[None] * 6,
    ]


def test_grading_compiles_once_per_shape_and_runs_under_vmap():
    before = GRADE._cache_size()
    by_arrays(["\\boxed{1}"] * 3, ["1"] * 3)
    by_arrays(["\\boxed{2} or so"] * 3, ["2"] * 3)
    assert GRADE._cache_size() - before <= 1
    tokens, mask = rows(["\\boxed{1}", "\\boxed{2}"], 16)
    gold, gold_mask = rows(["1", "1"], 2)
    stacked = [np.stack([a, a[::-1]]) for a in (tokens, mask, gold, gold_mask)]
    batched = jax.jit(jax.vmap(grade_tokens, in_axes=(0, 0, 0, 0, None)))
    assert batched(*stacked, TABLE).tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_from_tokens_to_advantages_in_one_jitted_function():
    tasks = list(micro.take("micro_math", "train", 4))
    responses = [
        micro.solution(t) if i < right else micro.mistake(t, i)
        for right, t in enumerate(tasks)
        for i in range(4)
    ]
    episode = np.repeat(np.arange(16), 2)  # two calls each
    role = np.tile([0, 1], 16)
    group = episode // 4 * 2 + role

    @jax.jit
    def advantages(tokens, mask, gold, gold_mask):
        outcome = grade_tokens(tokens, mask, gold, gold_mask, TABLE)
        return group_advantages(outcome[jnp.asarray(episode)], jnp.asarray(group))

    got = advantages(*rows(responses, 96), *rows([t.gold for t in tasks for _ in range(4)], 8))
    rewards = by_text(responses, [t.gold for t in tasks for _ in range(4)]).astype(np.float64)[episode]
    expected = np.zeros(32)
    for g in range(8):
        mine = rewards[group == g]
        expected[group == g] = (mine - mine.mean()) / (mine.std(ddof=1) + 1e-6)
    assert np.allclose(got, expected, atol=1e-5)
    assert rewards.reshape(4, 8).sum(axis=1).tolist() == [0, 2, 4, 6]
