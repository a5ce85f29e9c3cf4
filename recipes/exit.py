"""ExIt (arXiv 2509.04575): single steps of self-improvement, begun from partial histories that can still teach.

Claim: single revisions that begin from stored histories, drawn by how much their outcomes vary, teach more than
revisions of fresh drafts alone, and go on helping beyond the depth that was trained.

A history is a task of the buffer: its question, the messages so far, and the truth. A step on a problem of the data set
is a draft; its revisions, four of each, are about the history behind it, which so enters the buffer. A step on a
history is one revision. Divergence and the bonus for distance are left out.
"""

import functools
import hashlib

from marl_jax.task import Task
from marl_jax.workflows import Call, Fork, solver, workflow
from recipes.recipe import Claim, Recipe, Trained, micro

AGAIN = "\\boxed{Incorrect}\nfix"  # the words after which the base answers again


def longer(task, messages, said):
    """The history with another answer in it, as a task."""
    history = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": AGAIN}]
    name = hashlib.sha256("\n".join(m["content"] for m in history).encode()).hexdigest()[:12]
    return Task(f"made/{name}", "math", task.question, gold=task.gold, level=1, meta={"history": history})


@workflow(roles={"generator": solver}, families=("math",), counts=("depth", "revisions"))
def improved(task, prompts, *, depth=2, revisions=4):
    """One revision of a history, or a draft and revisions up to a depth; four of the first."""
    messages = task.meta.get("history")
    if messages:
        return (yield Call("generator", messages, about=task))
    messages = prompts.generator(question=task.question)
    answer = yield Call("generator", messages)
    for turn in range(1, depth):
        if turn == 1 and revisions > 1:
            yield Fork(revisions)
        task = longer(task, messages, answer.text)
        messages = task.meta["history"]
        answer = yield Call("generator", messages, about=task, reads=[answer])
    return answer


def config():
    """Half of the problems are histories."""
    return micro(
        "recipes.exit:improved",
        {"generator": "p0"},
        samples=4,
        rewards__name="own_correctness",
        advantages__group="task,role",
        data__buffer__capacity=512,
        data__buffer__share=0.5,
        data__buffer__draw="learnability",
    )


def at_depth(depth, trained: Trained) -> float:
    """The share of right answers where so many are given one after another."""
    table = trained.also.get(f"depth {depth}")
    return float(table.outcome.mean()) if table is not None else float("nan")


DEPTHS = (1, 8)

RECIPE = Recipe(
    system="ExIt, arXiv 2509.04575",
    claim="Single revisions from stored histories, drawn by learnability, teach more than those of fresh drafts, and "
    "help beyond the depth that was trained.",
    config=config,
    arms={
        "learnability": {},
        "uniform": {"data.buffer.draw": "uniform"},
        "fresh": {"data.buffer.capacity": 0},
    },
    claims=(
        Claim("accuracy", "learnability", "uniform"),
        Claim("accuracy", "learnability", "fresh"),
        Claim("depth 8", "learnability", "=depth 1"),
    ),
    measures={f"depth {depth}": functools.partial(at_depth, depth) for depth in DEPTHS},
    examined={"workflow.settings.revisions": 1},
    also={f"depth {depth}": {"workflow.settings.depth": depth} for depth in DEPTHS},
    hours=0.6,
)
