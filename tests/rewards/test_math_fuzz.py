"""Whatever is in the box, grading ends soon, without an exception, and finds an answer the same as itself."""

import gc
import random
import time

import pytest
from pace import slowness

from marl_jax.rewards.math import equivalent, math_pool
from marl_jax.rewards.math.spelling import clean

SOUP = r"""
    \frac \sqrt ( ) [ ] { } \{ \} | ^ _ ! , ; : = < > \le \ge \in \cup \pm \mp + - * / \cdot \times 1 2 10 0 0.5 .5 1e5
    x y i e \pi \infty a b \sin \cos^{-1} \log \ln \text{cm} cm or and % \% \$ $ ^\circ \begin{pmatrix} \end{pmatrix} \\
    & \left \right \binom \lfloor \rfloor \max \gcd f apples million _2 _{10} \overline{3} ? ' " . \circ no is degrees
    inf 100 000 1,000 {,} \, ~ \text{ \mathbb{R} \emptyset \ne ² √ ½ ° π \! A (A) {{ }} )) 9^{9^{9 !!! \color{red}
    \cap \setminus \over \choose
""".split()  # noqa: SIM905
LEAVES = r"1 2 0 10 x y n \pi e i 0.5 99 10^{20} 1e400 \infty -3 7^{500} 2000! 10^{4000}".split()  # noqa: SIM905
FORMS = [
    *(
        r"({a})+({b})",
        r"({a})-{b}",
        r"{a} \cdot {b}",
        r"\frac{{{a}}}{{{b}}}",
        r"({a})^{{{b}}}",
        r"\sqrt{{{a}}}",
    ),
    *(
        r"\sqrt[{b}]{{{a}}}",
        r"\sin {a}",
        r"\ln({a})",
        r"\log_{{{b}}}({a})",
        r"|{a}|",
        r"({a})!",
        r"e^{{{a}}}",
    ),
    *(
        r"\binom{{{a}}}{{{b}}}",
        r"\lfloor {a} \rfloor",
        r"\max({a},{b})",
        r"\gcd({a},{b})",
        r"{a}\%",
        r"\pm {a}",
    ),
    *(
        r"{{{a}}}\text{{ cm}}",
        r"\{{{a},{b}\}}",
        r"{a}<{b}",
        r"{a}={b}",
        r"({a},{b})",
        r"[{a},{b})\cup({b},{a}]",
        r"[{a},{b})\cap({a},{b}]",
        r"\mathbb{{R}}\setminus\{{{a},{b}\}}",
        r"x \ne {a}",
        r"{{{a} \over {b}}}",
        r"{a}\begin{{pmatrix}}{b}\\{a}\end{{pmatrix}}",
    ),
]


def soup(draw):
    return "".join(draw.choice(SOUP) + draw.choice(["", "", " "]) for _ in range(draw.randint(1, 40)))


def formula(draw, depth=3):
    if depth == 0:
        return draw.choice(LEAVES)
    a, b = formula(draw, depth - 1), formula(draw, draw.randint(0, depth - 1))
    return draw.choice(FORMS).format(a=a, b=b)


def fuzz(monkeypatch, count, seed):
    """Grade so many pairs of noise, with algebra that never agrees but checks what it would be sent."""

    def sent(a, b, cpu_s, wall_s):
        return math_pool.Verdict(not math_pool.json.dumps([a, b], default=math_pool._wire), 0.0, 0.0)

    monkeypatch.setattr(math_pool, "equal", sent)
    # Of this thread, and without the garbage of other tests: what they left running or lying about is not timed.
    gc.freeze()
    clock, draw, limit_s = time.thread_time, random.Random(seed), 0.5 * slowness()
    for _ in range(count):
        answer, gold = (draw.choice((soup, formula))(draw) for _ in range(2))
        begun = clock()
        equivalent(answer, gold)
        assert clock() - begun < limit_s, (answer, gold)
        assert equivalent(answer, answer) == (clean(answer) != ""), answer
    gc.unfreeze()


@pytest.mark.long
def test_no_noise_breaks_the_grader(monkeypatch):
    fuzz(monkeypatch, count=2_000, seed=0)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(1, 5))
def test_no_noise_breaks_the_grader_for_long(monkeypatch, seed):
    fuzz(monkeypatch, count=60_000, seed=seed)
