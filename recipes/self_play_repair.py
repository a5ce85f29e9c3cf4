"""Self-play SWE-RL (arXiv 2512.18552): one policy breaks programs and mends what it has broken.

Claim: injecting and mending, learned at once, mend more of the bugs of others than either alone, and than as much
training on given bugs.

The injector is shown a right program and writes it with a bug: in the sandbox it must still run, and fail a test. Its
bug is mended four times from the specification. If a share s of the mends is right, the injector earns 1 - 1.8 s for
0 < s < 1, -0.8 for 0 or 1, and -1 for a program that is no bug; a mender earns 1 or -1. Bugs stay in the buffer. A
wrong mend is a bug of the second order, which gets into the buffer, too. Evaluated on scripted mistakes in programs of
the test split; `given bugs` trains on such mistakes.
"""

import dataclasses
import hashlib

import numpy as np

from marl_jax.rewards.code import run_program
from marl_jax.rewards.families import program
from marl_jax.tasks import micro as tasks
from marl_jax.workflows import Call, Tool, solver, team, workflow
from recipes.recipe import Claim, Recipe, micro, part
from recipes.words import MORE_BASE, ask_injector, ask_mender, user

ALPHA = 0.8
TIME_LIMIT_S = 120.0  # for all tests of a program together


def breaks(task, text):
    """Tool: whether the program in a text runs and a test finds a wrong value."""
    code = program(task, text)
    verdict = run_program(code, task.tests) if code else None
    return bool(verdict and verdict.reason.partition(": ")[2] == "wrong answer")


def bug(task, text, order):
    """A broken program as a problem, with the tests of the original program."""
    name = hashlib.sha256(f"{task.question}\n{text}".encode()).hexdigest()[:12]
    return dataclasses.replace(task, id=f"made/{name}", meta={**task.meta, "broken": text, "order": order})


@workflow(roles={"injector": team, "mender": solver(slots="tries")}, families=("code",), counts=("tries",))
def broken_and_mended(task, prompts, *, tries=4, given=False):
    """A bug from the buffer, a given one, or else one that the injector writes; then `tries` mends of it."""
    made = task
    if given:
        made = bug(task, tasks.mistake(task, 0, "steps"), 1)
    elif "broken" not in task.meta:
        right = tasks.solution(task)
        ask = user(ask_injector(task.question, right))
        written = yield Call("injector", ask)
        if not (yield Tool(breaks, (task, written.text), timeout_s=TIME_LIMIT_S)):
            return None
        made = bug(task, written.text, 1)
    mends = yield [_mend(made, slot) for slot in range(tries)]
    first = not given and made.meta["order"] == 1
    if first and (yield Tool(breaks, (task, mends[0].text), timeout_s=TIME_LIMIT_S)):
        yield _mend(bug(task, mends[0].text, 2), 0)
    return mends[0]


def _mend(made, slot):
    ask = user(ask_mender(made.question, made.meta["broken"]))
    return Call("mender", ask, slot=slot, about=made)


def paid(graded):
    """Injectors earn by how often their bug is mended in the first turn, menders by their tests."""
    return [[_paid(one, i) for i in range(len(one.calls))] for one in graded]


def _paid(one, i):
    if one.calls[i].role == "mender":
        return 1.0 if one.answers[i] else -1.0
    mends = [one.answers[j] for j, call in enumerate(one.calls) if call.role == "mender" and not call.turn]
    if not mends:
        return -1.0
    share = float(np.mean(mends))
    return 1 - (1 + ALPHA) * share if 0 < share < 1 else -ALPHA


def config():
    """Half of the problems are bugs of the buffer, of both orders alike."""
    return micro(
        "recipes.self_play_repair:broken_and_mended",
        dict.fromkeys(("injector", "mender"), "p0"),
        base=MORE_BASE,
        family="code",
        levels=(1, 2),
        problems=8,
        samples=4,
        rewards__name="recipes.self_play_repair:paid",
        advantages__group="task,role",
        data__buffer__capacity=256,
        data__buffer__share=0.5,
        data__buffer__streams="order",
    )


RECIPE = Recipe(
    system="Self-play SWE-RL, arXiv 2512.18552",
    claim="A policy that breaks programs and mends them mends more of the bugs of others than one that learns either "
    "alone, or from given bugs.",
    config=config,
    arms={
        "both": {},
        "mending alone": {"policies.frozen_roles": ["injector"]},
        "breaking alone": {"policies.frozen_roles": ["mender"]},
        "given bugs": {"workflow.settings.given": True, "data.buffer.capacity": 0},
    },
    claims=(
        Claim("accuracy", "both", "base"),
        Claim("accuracy", "both", "mending alone"),
        Claim("accuracy", "both", "breaking alone"),
        Claim("accuracy", "both", "given bugs"),
    ),
    measures={
        "reward of injectors": part("role/injector/reward"),
        "bugs": part("buffer/size/1"),
        "bugs of the second order": part("buffer/size/2"),
    },
    examined={"workflow.settings.given": True, "workflow.settings.tries": 1},
    hours=0.7,
)
