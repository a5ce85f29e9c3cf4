"""How fast are math answers graded? Ordinary answers once each (nothing cached), again (cached), and by algebra.

python -m benchmarks.grading [--count=4000]
"""

import json
import random
import time

from absl import app, flags

from marl_jax.rewards import grade_math
from marl_jax.rewards.math import math_pool

COUNT = flags.DEFINE_integer("count", 4000, "ordinary answers to grade")

PROSE = "We add the two parts, $\\frac{a}{b} + c$, and simplify the sum $x_{1} + x_{2}$ step by step. " * 20


def ordinary(count: int) -> list[tuple[str, str]]:
    """Distinct (response, gold) pairs in the proportions of a competition data set; half of them are right."""
    draw = random.Random(0)

    def pair(n: int) -> tuple[str, str]:
        a, b = n + 2, draw.randint(2, 99)
        kinds = [(f"{a}", f"{a}")] * 8 + [
            (rf"\frac{{{a}}}{{{b}}}", rf"\dfrac{{{a}}}{{{b}}}"),
            (f"{a}.5", rf"\frac{{{2 * a + 1}}}{{2}}"),
            (rf"{a}\text{{ cm}}", f"{a}"),
            (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b}}}"),
            (rf"\left( {a}, {b} \right)", f"({a},{b})"),
            (rf"[{a}, {a + b})", rf"\left[{a},{a + b}\right)"),
            (rf"\{{{a}, {-b}\}}", rf"{-b}, {a}"),
            (rf"x = {a}", f"{a}"),
            (rf"{a}x^2 + {b}x", rf"x({a}x + {b})"),
            (rf"{a}\pi", rf"\pi \cdot {a}"),
            (rf"\text{{({chr(65 + n % 5)})}}", f"{chr(65 + n % 5)}"),
            (rf"\$ {a},{draw.randint(100, 999)}", f"{a}"),
        ]
        answer, gold = draw.choice(kinds)
        return answer, gold if n % 2 else gold.replace(str(a), str(a + 1))

    return [
        (rf"{PROSE}So the answer is $\boxed{{{answer}}}$.", gold) for answer, gold in map(pair, range(count))
    ]


def rate(pairs: list[tuple[str, str]]) -> float:
    begun = time.perf_counter()
    for response, gold in pairs:
        grade_math(response, gold)
    return len(pairs) / (time.perf_counter() - begun)


def main(_: list[str]) -> None:
    pairs = ordinary(COUNT.value)
    first, again = rate(pairs), rate(pairs)
    begun = time.perf_counter()
    grade_math(r"\boxed{\sin 30^\circ}", r"\frac12")
    start_s = time.perf_counter() - begun
    algebra = rate([(rf"\boxed{{\ln {n} + \ln 7}}", rf"\ln {7 * n}") for n in range(2, 42)])
    math_pool.close()
    report = {
        "gradings_per_s": first,
        "cached_per_s": again,
        "algebra_per_s": algebra,
        "first_algebra_s": start_s,
    }
    print(json.dumps({name: round(value, 2) for name, value in report.items()}))


if __name__ == "__main__":
    app.run(main)
