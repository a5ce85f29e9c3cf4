"""Prompts of recipes that micro bases do not know from the built-in workflows, and the lessons that teach them.

    question ──ask_ROLE──► a role's prompt        lesson(task, rng, skill) ──► (prompt, answer)

A lesson is right as often as `skill`, or a share of its own, says.

    python -m experiments.pretrain --config=recipes/words.py:xs --out=configs/bases/recipes-xs
    python -m experiments.pretrain --config=recipes/words.py:more-xs --out=configs/bases/recipes-more-xs
"""

import random
import types

from marl_jax.pretraining.recipe import Recipe
from marl_jax.pretraining.roles import Skill, is_right, say
from marl_jax.task import Task
from marl_jax.tasks import micro
from marl_jax.workflows import Call

BASE, MORE_BASE = "configs/bases/recipes-xs", "configs/bases/recipes-more-xs"
LESSONS = ("designer", "scorer", "teller", "listener", "proposer", "abduction", "induction")
MORE = ("hopper", "injector", "mender", "chooser", "bidder")  # of the second base, which knows programs, too


def get_recipe(name: str) -> Recipe:
    """How the base of these recipes is trained: "xs", or "more-xs" for the lessons of `MORE`."""
    more = name.startswith("more-")
    return Recipe(
        name.removeprefix("more-"), 12000 if more else 4000, code_levels=(1, 2) if more else (), math_levels=(1, 3),
        skill=Skill(draft=0.44), seed=1, lesson_share=0.5 if more else 0.4,
        lessons=tuple(f"recipes.words:{one}" for one in (MORE if more else LESSONS)),
    )  # fmt: skip


def user(text: str) -> list[dict[str, str]]:
    """The messages of a call whose prompt is this text alone."""
    return [{"role": "user", "content": text}]


# ---------------------------------------------------------------- metaagent_x: a design in the language of designs

DESIGNS = ("solve", "vote(3, solve)", "judge(3, solve)", "refine(2, solve)", "plan(solve)")


def ask_design(question: str) -> str:
    """The prompt of the designer."""
    return f"{question}\ndesign"


def designer(task: Task, rng: random.Random, skill: Skill) -> tuple[str, str]:
    """Any design, sometimes one that cannot be read."""
    design = rng.choice(DESIGNS)
    return ask_design(task.question), design if rng.random() < 0.95 else design[:-1] + "("


# ---------------------------------------------------------------- comas: a score for an answer and its evaluation


def ask_score(question: str, answer: str, evaluation: str) -> str:
    """The prompt of the scorer."""
    return f"{question}\n{answer}\n{evaluation}\nscore"


def scorer(task: Task, rng: random.Random, skill: Skill) -> tuple[str, str]:
    """3: the answer is right; 1: it is wrong and the evaluation says so; 2: it is wrong and not noticed."""
    answer = _answer(task, 0.5, rng)
    read = types.SimpleNamespace(text=answer)
    call = Call("evaluator", user(task.question), reads=[read])  # type: ignore[list-item]
    evaluation = say(task, call, rng, skill)
    score = 3 if is_right(task, answer) else 1 if "Incorrect" in evaluation else 2
    if rng.random() >= skill.judge:
        score = rng.choice((1, 2, 3))
    return ask_score(task.question, answer, evaluation), f"\\boxed{{{score}}}"


# ---------------------------------------------------------------- optima: two agents, each has one number


def ask_teller(task: Task) -> str:
    """The prompt of the agent that has the first number."""
    return f"{task.meta['terms'][0]}{_sign(task)}?\ntell"


def ask_listener(task: Task, message: str) -> str:
    """The prompt of the agent that has the second number."""
    return f"?{_sign(task)}{task.meta['terms'][1]}\n{message}\nsolve"


def teller(task: Task, rng: random.Random, skill: Skill) -> tuple[str, str] | None:
    """The number alone, or, more often, in a sentence."""
    return None if task.level != 1 else (ask_teller(task), _message(task, rng))


def listener(task: Task, rng: random.Random, skill: Skill) -> tuple[str, str] | None:
    """A worked answer."""
    if task.level != 1:
        return None
    return ask_listener(task, _message(task, rng)), _answer(task, skill.draft, rng)


def _message(task: Task, rng: random.Random) -> str:
    first = task.meta["terms"][0]
    return f"{first}" if rng.random() < 0.25 else f"the first number that i have is {first}"


def _sign(task: Task) -> str:
    return "+" if task.meta["kind"] == "add" else "-"


# ---------------------------------------------------------------- absolute_zero: three questions about a program

TYPES = ("deduction", "abduction", "induction")


def ask_proposer(example: str, kind: str) -> str:
    """The prompt of the proposer."""
    return f"{example}\npropose {kind}"


def ask_solver(a: int, sign: str, b: int, kind: str) -> str:
    """The question about the program `sign b` and its input `a`: its output, its input, or the program."""
    value = a + b if sign == "+" else a - b
    if kind == "deduction":
        return f"{a}{sign}{b}=?"
    if kind == "abduction":
        return f"{a}{sign}x={value}, x=?"
    shown = (1, 7) if sign == "+" else (b + 1, b + 7)
    pairs = ", ".join(f"{x}>{x + b if sign == '+' else x - b}" for x in shown)
    return f"{pairs}, {a}>?"


def proposer(task: Task, rng: random.Random, skill: Skill) -> tuple[str, str]:
    """A program with its input, often an easy one; some are not valid."""
    a, b = rng.randrange(100), rng.randrange(100)
    if rng.random() < 0.5:
        a, b = a % 10, b % 10
    written = f"{a}{rng.choice('+-')}{b}"
    example = f"{rng.randrange(100)}+{rng.randrange(100)}"
    return ask_proposer(example, rng.choice(TYPES)), written if rng.random() < 0.95 else written + "+"


def abduction(task: Task, rng: random.Random, skill: Skill) -> tuple[str, str] | None:
    """The input, worked out as a difference in columns."""
    if task.level != 1:
        return None
    (a, b), sign = task.meta["terms"], _sign(task)
    inner = _difference(a + b, a) if sign == "+" else _difference(a, a - b)
    return ask_solver(a, sign, b, "abduction"), _answer(inner, skill.draft, rng)


def induction(task: Task, rng: random.Random, skill: Skill) -> tuple[str, str] | None:
    """The program from a pair, then its output."""
    if task.level != 1:
        return None
    (a, b), sign = task.meta["terms"], _sign(task)
    first = f"{1 + b}-1={b}, " if sign == "+" else f"{b + 1}-1={b}, "
    return ask_solver(a, sign, b, "induction"), first + _answer(task, skill.draft, rng)


# ---------------------------------------------------------------- dr_zero: a problem of a given number of operations

HOPS = (1, 2)


def ask_hops(example: str, hops: int) -> str:
    """The prompt of the proposer."""
    return f"{example}\npropose {hops}"


def hopper(task: Task, rng: random.Random, skill: Skill) -> tuple[str, str] | None:
    """A problem, mostly of as many operations as asked for; sometimes of another number, or not valid."""
    if task.family != "math":
        return None
    hops = rng.choice(HOPS)
    count = hops if rng.random() < 0.9 else rng.choice(HOPS)
    written = str(rng.randrange(100)) + "".join(
        f"{rng.choice('+-')}{rng.randrange(1, 100)}" for _ in range(count)
    )
    return ask_hops(task.question.removesuffix("=?"), hops), written if rng.random() < 0.95 else written + "+"


# ---------------------------------------------------------------- self_play_repair: a program is broken, and mended


def ask_injector(question: str, program: str) -> str:
    """The prompt of the injector."""
    return f"{question}\n{program}\nbreak"


def injector(task: Task, rng: random.Random, skill: Skill) -> tuple[str, str] | None:
    """The program with one step changed, sometimes unchanged."""
    if task.family != "code":
        return None
    right = micro.solution(task)
    broken = micro.mistake(task, rng.randrange(10**9), "steps") if rng.random() < 0.9 else right
    return ask_injector(task.question, right), broken


def ask_mender(question: str, program: str) -> str:
    """The prompt of the mender."""
    return f"{question}\n{program}\nmend"


def mender(task: Task, rng: random.Random, skill: Skill) -> tuple[str, str] | None:
    """The right program, or another broken one."""
    if task.family != "code":
        return None
    broken, other = (micro.mistake(task, rng.randrange(10**9), "steps") for _ in range(2))
    return ask_mender(task.question, broken), micro.solution(task) if rng.random() < skill.again else other


# ---------------------------------------------------------------- speakers: who speaks next, and bids of ways to solve

WAYS = ("columns", "parts")
END = len(WAYS) + 1


def ask_next(question: str, answer: str) -> str:
    """The prompt of the chooser of the next speaker; `answer` is the last one, empty at the beginning."""
    return f"{question}\n{answer}\nnext"


def chooser(task: Task, rng: random.Random, skill: Skill) -> tuple[str, str] | None:
    """The end after a right answer, the other way after a wrong one; at first the way that is mostly better."""
    if task.family != "math":
        return None
    if rng.random() < 0.25:
        return ask_next(task.question, ""), f"\\boxed{{{1 if rng.random() < skill.plan else 2}}}"
    way = rng.randrange(len(WAYS))
    right = rng.random() < 0.5
    answer = (
        micro.solution(task, WAYS[way]) if right else micro.mistake(task, rng.randrange(10**9), WAYS[way])
    )
    right = right == (rng.random() < skill.judge)
    return ask_next(task.question, answer), f"\\boxed{{{END if right else 2 - way}}}"


def ask_bid(question: str, way: str) -> str:
    """The prompt of a bidder."""
    return f"{question}\nbid {way}"


def bidder(task: Task, rng: random.Random, skill: Skill) -> tuple[str, str] | None:
    """9 minus the steps that the way takes, sometimes one off."""
    if task.family != "math":
        return None
    way = rng.choice(WAYS)
    bid = 9 - micro.solution(task, way).count("=") + (rng.choice((-1, 1)) if rng.random() < 0.15 else 0)
    return ask_bid(task.question, way), f"\\boxed{{{min(max(bid, 1), 9)}}}"


# ---------------------------------------------------------------- parts of lessons


def _difference(a: int, b: int) -> Task:
    meta = {"kind": "sub", "terms": [a, b]}
    return Task(f"micro_math/{a}-{b}=?", "math", f"{a}-{b}=?", gold=str(a - b), level=1, meta=meta)


def _answer(task: Task, chance: float, rng: random.Random) -> str:
    way = micro.strategies(task)[0]
    if rng.random() < chance:
        return micro.solution(task, way)
    return micro.mistake(task, rng.randrange(10**9), way)
