"""Sums that a role proposes, for recipes whose problems are made while they train.

text ──executed──► a Task whose answer is computed; None if the text is no sum, or the sum is out of range or held out
"""

import functools
import re

from marl_jax.task import Task
from marl_jax.tasks.micro import split_of
from marl_jax.tasks.micro_math import key
from marl_jax.workflows import Call
from recipes.words import ask_proposer, ask_solver, user

ONE = re.compile(r"(\d{1,2})([+-])(\d{1,2})")  # an operation
TWO = re.compile(r"\d{1,2}(?:[+-]\d{1,2}){2}")


def executed(kind, text):
    """A question of this kind about the operation that the text spells; see `words.ask_solver`."""
    match = ONE.fullmatch(text.strip())
    if match is None:
        return None
    a, sign, b = int(match[1]), match[2], int(match[3])
    value = a + b if sign == "+" else a - b
    if value < 0 or is_held_out("add" if sign == "+" else "sub", a, b):
        return None
    gold, question = (b if kind == "abduction" else value), ask_solver(a, sign, b, kind)
    return Task(f"made/{kind} {a}{sign}{b}", "math", question, gold=str(gold), level=1, meta={"type": kind})


def chained(text):
    """The problem of one or two operations that the text spells."""
    if not TWO.fullmatch(text.strip()):
        return executed("deduction", text)
    terms = [int(term) for term in re.findall(r"[+-]?\d+", text)]
    question = f"{text.strip()}=?"
    made = Task(f"made/{question}", "math", question, gold=str(sum(terms)), level=3)
    return None if is_held_out("chain", *terms) else made


def is_held_out(kind, *terms):
    """Whether the problem is in the val or the test split: no proposer may write one of those."""
    return split_of(key(Task("", "math", "", meta={"kind": kind, "terms": terms}))) != "train"


def valid(kind, text):
    """The id of the problem that the text spells: a reader of proposals."""
    made = executed(kind, text)
    return made and made.id


def asked_for(role, rng, kind="deduction", **more):
    """Ask a role for a problem, with a random example in its prompt."""
    ask = user(ask_proposer(f"{rng.integers(100)}+{rng.integers(100)}", kind))
    written = yield Call(role, ask, read=functools.partial(valid, kind), **more)
    return None if written.answer is None else executed(kind, written.text)
