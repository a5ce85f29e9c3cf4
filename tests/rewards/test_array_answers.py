"""Answers that are graded in arrays earn what the math grader gives them."""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from array_rows import GRADE, READ, by_text, graded, rows, said_by_a_base, spelled, strings, text_of

from marl_jax.learning.estimators.advantages import group_advantages
from marl_jax.rewards import arrays
from marl_jax.rewards.arrays.clean_texts import ALPHABET
from marl_jax.rewards.math import grade_math
from marl_jax.rewards.math.boxed import extract_boxed
from marl_jax.tasks import micro


def agree(responses, golds, beyond_at_most=1.0, lost_at_most=1.0):
    """The two graders agree on every response that is not beyond the arrays; returns what is right, what beyond.

    Of all that are right at most the share `lost_at_most` is beyond them.
    """
    expected = by_text(responses, golds)
    right, beyond = graded(responses, golds)
    different = np.flatnonzero((right != expected) & ~beyond)
    assert not different.size, [(responses[i], golds[i], bool(right[i])) for i in different[:8]]
    assert not (right & beyond).any()
    assert beyond.mean() <= beyond_at_most
    print(f"{beyond.mean():.4f} beyond, {(expected & beyond).sum()} of {expected.sum()} right ones")
    assert (expected & beyond).sum() <= lost_at_most * expected.sum()
    return expected, beyond


def test_worked_answers_and_mistakes_of_the_micro_tasks():
    tasks = list(micro.take("micro_math", "train", 300, levels=(1, 2, 3, 4, 5)))
    responses = [micro.solution(task) for task in tasks] + [micro.mistake(task, 0) for task in tasks]
    expected, beyond = agree(responses, 2 * [int(task.gold) for task in tasks])
    assert expected.tolist() == [True] * 300 + [False] * 300
    assert not beyond.any()


SPACE = str.maketrans("_", " ")  # in the lists below, _ stands for a space
RIGHT = """
7  7 +7 --7 -_-7 007 {7} $7$ $7 7. 7.0 7.00 07. =7 7= 7... 14/2 14_/_2 -14/-2 14/2/1 (14)/2 (7) ((7)) 6_3/3 6_4/4
7  x=7 x_=_7 x=7.0 x=(7) (x=7) 7=7 7==7 3+4=7 5_+_2_=_7 x=21/3=7 x_=_21/3_=_7 3*2+1=7 x+x=7 xx=7 x(3)=7 x(1,2)=7
7  x-x=7 x_-x+x_=_7 x-x+7 7+0x {x}=7 7;: $x=7$ -(-7) --(7) x=-(-7)
-7 -7 +-7 -7.0 -(7) x=-7 -14/2 3-10=-7 14/-2 {-7} -$7
0  0 -0 0.0 0/5 0x x-x 0x=0 x=0 x-x=0
999999999 999999999 x=999999999
-999999999 -999999999
65522 65522 131044/2
"""
WRONG = """
7  7-0 7+0 3+4 7*1 7(1) (7)(1) 7,7 7:1 7/0 8 -7 77 .7 7.1 7.01 3=7 3+5=7 x=3+4 7=x x=8=7 5=x=7 1.2.3 7..1 7/ {} (7
7  7) ( () 7=8 14/2/0 1.5 6 $7=7 $=7 x x7 7x xxxxx 7,8,... 7,... (7,8) x=7,x=7 7_7 6_3/2 6.5_1/2 6_1/0 1_2_3 7_0
7  6_3.0/3 6_3/3.0 6_-3/3 7_x_1_=7
0  0xxxxx 0/0 x/x () 00xxxxxx
999999999 999999998 -999999999
65522 1
"""


def listed(lines):
    """(response, gold) of each answer in lines that begin with their gold."""
    for gold, *answers in map(str.split, lines.strip().splitlines()):
        for answer in answers:
            yield f"\\boxed{{{answer.translate(SPACE)}}}", int(gold)


@pytest.mark.long
@pytest.mark.parametrize("lines, verdict", [(RIGHT, True), (WRONG, False)], ids=["right", "wrong"])
def test_ways_to_write_an_integer(lines, verdict):
    """Each with what the hosted grader says of it, which is worked out by hand, too."""
    pairs = list(listed(lines))
    expected, beyond = agree(*zip(*pairs))
    assert [pair for pair, same in zip(pairs, expected) if same != verdict] == []
    assert [pair for pair, far in zip(pairs, beyond) if far] == []


BEYOND = r"7\% 7_apples \frac{14}{2} 2^3-1 7! |7| [7] y=7 7,000 7_000 2**3 *7 7*/1 0() x()=7"


@pytest.mark.long
@pytest.mark.parametrize("answer", BEYOND.split())
def test_other_ways_are_counted_and_earn_nothing(answer):
    right, beyond = graded([f"\\boxed{{{answer.translate(SPACE)}}}"] * 2, [7, 7000])
    assert not right.any()
    assert beyond.all()


@pytest.mark.long
def test_a_large_number_is_not_its_remainder():
    answers = ["4294967303", "18446744073709551623", "65528", "4292608006", "7" + "0" * 40, "0" * 40 + "7"]
    expected, beyond = agree([f"\\boxed{{{a}}}" for a in answers], [7] * 6)
    assert expected.tolist() == [False] * 5 + [True]
    assert not beyond.any()


def boxes(alphabet, length):
    return ["\\boxed{" + "".join(chars) + "}" for chars in itertools.product(alphabet, repeat=length)]


@pytest.mark.long
def test_all_short_answers_of_the_alphabet():
    for length in (1, 2, 3):
        texts = boxes("0147+-*/.,;=(){}x$ :" if length < 3 else "017+-*/.=()x ", length)
        for gold in (7, 0) if length < 3 else (7,):
            agree(texts, [gold] * len(texts), beyond_at_most=0.5, lost_at_most=0)
    texts = boxes("7x-+=", 5)
    agree(texts, [7] * len(texts), beyond_at_most=0)


@pytest.mark.campaign
@pytest.mark.parametrize("gold", [0, 1, 7, -1])
def test_all_longer_answers_of_the_alphabet(gold):
    everything = bytes(ALPHABET).decode()
    for length in (1, 2, 3):
        texts = boxes(everything, length)
        agree(texts, [gold] * len(texts), beyond_at_most=0.25, lost_at_most=0)
    for alphabet, length in (("017+-*/.,=(){}x$ ", 4), ("17-+/*=x(). ", 5), ("17-/=x ", 6)):
        texts = boxes(alphabet, length)
        agree(texts, [gold] * len(texts), beyond_at_most=0.65, lost_at_most=0.05)  # 1**7 and such powers


PIECES = [
    "\\boxed",
    "\\boxed{",
    "\\boxed{",
    "\\boxed{7}",
    "\\fbox{",
    "{",
    "}",
    "}",
    "\\",
    "$",
    "7",
    "-",
    "+",
    "0",
    " ",
]
PIECES += ["\n", "x", ".", "12", "=", "/", ", ", "    ", "answer", "\\}", "*", "(", ")"]


def soups(seed, count, pieces=PIECES, longest=14):
    rng = random.Random(seed)
    return ["".join(rng.choices(pieces, k=rng.randrange(1, longest))) for _ in range(count)]


@pytest.mark.campaign
@pytest.mark.parametrize("seed", [0])
def test_any_soup_of_boxes_and_pieces(seed):
    texts = soups(seed, 2000)
    golds = [random.Random(i).choice((7, -7, 77, 12, 0)) for i in range(len(texts))]
    expected, _ = agree(texts, golds)
    assert 0.02 < expected.mean() < 0.5


@pytest.mark.campaign
def test_a_hundred_thousand_soups():
    inside = [*"7120+-*/=x(){}., $", "14", "21", "3", "x="]
    texts = soups(0, 50_000, longest=18) + [f"\\boxed{{{s}}}" for s in soups(1, 50_000, inside, longest=10)]
    agree(texts, [random.Random(i).choice((7, -7, 77, 12, 0, 1, 14)) for i in range(len(texts))])


@pytest.mark.campaign
def test_a_hundred_thousand_answers_of_a_micro_base(count=100_000, block=2000):
    """Sampled hot, so that they go astray; few are beyond the arrays, and of those hardly any is right elsewhere."""
    lost = 0
    for texts, tasks in said_by_a_base("micro_math", count // block, block):
        expected, beyond = agree(texts, [int(task.gold) for task in tasks], beyond_at_most=0.2)
        lost += int((expected & beyond).sum())
    assert lost <= count / 10_000


@pytest.mark.long
def test_the_box_that_is_read_is_that_of_the_hosted_road():
    texts = ["a \\boxed{1} \\boxed{2 {3} x}", "\\boxed{\\boxed5.}", "\\boxed\\boxed5.", "\\boxed{\\{7} ", ""]
    texts += ["\\boxed{5\\ }", "\\boxed{5 \\ \\ }", "\\boxed{\\ }", "\\boxed{5\\\\ }", "\\boxed{5 }"]
    texts += soups(7, 2000)
    text = spelled(texts, 128)
    assert strings(text) == texts
    solved = READ(text)
    read = [
        bytes(row[a:b]).decode() if found else None
        for row, a, b, found in zip(*map(np.asarray, (text.chars, solved.start, solved.end, solved.readable)))
    ]
    wanted = [extract_boxed(each) for each in texts]
    assert [(t, r, w) for t, r, w in zip(texts, read, wanted) if r != w] == []
    assert sum(answer is not None for answer in read) > 300
    keys = dict(zip(map(bytes, np.asarray(solved.key)), read))
    assert len(keys) == len(set(read) | {None})  # equal keys for equal answers only
    assert all(keys[key] == answer for key, answer in zip(map(bytes, np.asarray(solved.key)), read))


@pytest.mark.long
def test_grading_compiles_once_for_a_shape_and_runs_under_vmap():
    before = GRADE._cache_size()
    graded(["\\boxed{1}"] * 3, [1] * 3, width=48)
    graded(["\\boxed{2} or so"] * 3, [1] * 3, width=48)
    assert GRADE._cache_size() - before == 1
    tokens, lengths = rows(["\\boxed{1}", "\\boxed{2}"])
    gold = jnp.array([1, 1])
    stacked = [np.stack([a, a[::-1]]) for a in (tokens, lengths, gold)]
    verdict = jax.jit(jax.vmap(lambda *each: GRADE(*each, width=16)))(*stacked)
    assert verdict.right.tolist() == [[True, False], [False, True]]


def test_from_tokens_to_advantages_in_one_jitted_function():
    tasks = list(micro.take("micro_math", "train", 4))
    responses = [
        micro.solution(t) if i < right else micro.mistake(t, i)
        for right, t in enumerate(tasks)
        for i in range(4)
    ]
    golds = [int(t.gold) for t in tasks for _ in range(4)]
    group = np.arange(16) // 4

    @jax.jit
    def advantages(tokens, lengths, gold):
        text = text_of(tokens, lengths)
        outcome = arrays.grade_integers(text, arrays.read_answers(text), gold, width=96).right
        return group_advantages(outcome.astype(jnp.float32), jnp.asarray(group))

    got = advantages(*rows(responses, 96), jnp.array(golds))
    rewards = np.array([grade_math(r, str(g)) for r, g in zip(responses, golds)]).reshape(4, 4)
    expected = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    assert np.allclose(got, expected.ravel(), atol=1e-5)
    assert rewards.sum(axis=1).tolist() == [0, 1, 2, 3]
