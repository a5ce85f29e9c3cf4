"""ExIt (arXiv 2509.04575): single steps of self-improvement, begun from partial histories that can still teach.

Claim: single revisions that begin from stored histories of any depth, drawn by how much their outcomes vary, make late
revisions better than training on first revisions alone, and better than histories that are drawn evenly.

A history is a task of the buffer: its question, the messages so far, and the truth. A step on a problem of the data set
is a draft, a step on a history is one revision. The history with the new answer enters the buffer, and the grades of
its four revisions decide how likely it is drawn; so depth grows by itself. It ends at four answers, because these and
their prompts fit in the 256 tokens that the base was trained on. "fix" asks for a revision, also of right answers.

`short` draws histories of one answer, which do not grow; `fresh` has no buffer. Both see only first revisions.
Departures: the paper's divergent steps and its bonus for distance are left out, and so are episodes of a fixed number
of revisions, with which it compares. The paper evaluates up to 16 revisions, more than were trained; here the third
revision, the last that is measured, is also the last that is trained.
"""

import hashlib

import numpy as np

from marl_jax.task import Task
from marl_jax.workflows import Call, Fork, solver, workflow
from recipes.recipe import Claim, Recipe, Trained, mean, micro, over_problems

STEPS = 40
MOST = 4  # answers to a question, one after another
LONGEST = 48  # tokens of an answer; a right one has 28 or less


def longer(task, messages, text, ask):
    """The history with another answer in it and the request to revise it, as a task."""
    history = [*messages, {"role": "assistant", "content": text}, *ask]
    name = hashlib.sha256("\n".join(m["content"] for m in history).encode()).hexdigest()[:12]
    return Task(f"made/{name}", "math", task.question, gold=task.gold, level=1, meta={"history": history})


def answers_in(task):
    """The number of answers in a history; 0 for a problem of the data set."""
    return sum(message["role"] == "assistant" for message in task.meta.get("history", ()))


@workflow(roles={"generator": solver}, families=("math",), counts=("depth", "revisions", "most"))
def improved(task, prompts, *, depth=2, revisions=4, most=MOST):
    """The next answer to a problem or a history, and revisions of it: up to `depth` answers, `most` with the history.

    The next answer gets `revisions` parallel revisions, and each of these is revised further by itself.
    """
    messages = task.meta.get("history") or prompts.generator(question=task.question)
    left = most - answers_in(task)
    answer = yield Call("generator", messages)
    for turn in range(1, min(depth, left)):
        if turn == 1 and revisions > 1:
            yield Fork(revisions)
        task = longer(task, messages, answer.text, prompts.generator.revise())
        messages = task.meta["history"]
        answer = yield Call("generator", messages, about=task, reads=[answer])
    return answer


def config():
    """Half of the problems are histories; all calls are stored, for `late_share`."""
    return micro(
        "recipes.exit:improved",
        {"generator": "p0"},
        steps=STEPS,
        samples=4,
        sampling__max_new_tokens=LONGEST,
        rewards__name="own_correctness",
        advantages__group="task,role",
        data__buffer__capacity=512,
        data__buffer__share=0.5,
        data__buffer__draw="learnability",
        phases=[{"steps": STEPS, "name": "all", "collect": True}],
    )


def graded(turn):
    """A measure: whether the answers of this turn are right."""

    @over_problems
    def right(table):
        return np.bincount(table.episode, table.grade * (table.turn == turn), len(table.bare_episodes))

    return right


def late_share(trained: Trained) -> float:
    """The share of the calls of training that are a second revision or a later one."""
    tables = trained.collected()
    return mean([answers_in(table.task_of(row)) > 1 for table in tables for row in range(len(table))])


RECIPE = Recipe(
    system="ExIt, arXiv 2509.04575",
    claim="Single revisions from stored histories that grow, drawn by learnability, make late revisions better than "
    "training on first revisions alone.",
    config=config,
    arms={
        "learnability": {},
        "uniform": {"data.buffer.draw": "uniform"},
        "short": {"workflow.settings.most": 2},
        "fresh": {"data.buffer.capacity": 0},
    },
    claims=(
        Claim("after three revisions", "learnability", "short"),
        Claim("after three revisions", "learnability", "fresh"),
        Claim("after three revisions", "learnability", "uniform"),
        Claim("after three revisions", "learnability", "=after one revision"),
    ),
    measures={
        "one answer": graded(0),
        "after one revision": graded(1),
        "after three revisions": graded(3),
        "late share": late_share,
    },
    examined={
        "workflow.settings.revisions": 1,
        "workflow.settings.depth": MOST,
        "workflow.settings.most": MOST,
    },
    hours=0.8,
)
