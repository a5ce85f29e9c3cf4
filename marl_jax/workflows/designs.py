"""Workflows as data: a small language for how roles work together, written by a model or a person.

    text ──read──► Design (bounded in calls) ──play──► calls, results, an answer      no code from a model is ever run

    solve                   one answer by a role of this name; any name but those below
    solve("by parts")       one answer by the given method
    vote(3, X)              X three times, the most common answer
    judge(3, X)             X three times; a judge picks one
    refine(2, X)            X, then at most two rounds of a critic's verdict and a revision
    debate(3, 2, X)         X three times, each answers the others twice, the most common answer
    plan(X)                 a planner names a method, which X follows
    route(X, Y)             a router picks one of them
    then(X, Y)              Y reads the answer of X

The names of roles in a design are open: `Rules` say which declared role of the workflow answers for a name, and so
which policy does.
"""

import collections
import dataclasses
import fnmatch
import functools
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from marl_jax.errors import UserError
from marl_jax.fields import nearest
from marl_jax.workflows.api import Call, Completion
from marl_jax.workflows.parse import majority, pick, plan_of, verdict

Rules = Mapping[str, str]  # {pattern of open names: role of the workflow}; the first match counts
Results = list[Completion]
Draft = tuple[Completion, str]  # a completion and the open name of the role that wrote it
Script = Generator[list[Call], Results, Draft]

COUNTS = {"vote": 1, "judge": 1, "refine": 1, "debate": 2, "plan": 0, "route": 0, "then": 0}
PARTS = {"route": (2, 9), "then": (2, 9)}  # least and greatest number of inner designs; others have one
CHIEFS = {"judge": "judge", "refine": "critic", "plan": "planner", "route": "router"}  # supervising roles
TOKEN = re.compile(
    r'\s*(?:(?P<name>[A-Za-z_]\w{0,39})|(?P<count>\d+)|"(?P<words>[^"\\\n]{0,200})"|(?P<mark>[(),]))'
)
LONGEST, DEEPEST = 2000, 8  # most characters, and most levels of nesting, of a design


class DesignError(UserError, ValueError):
    """A text is not a design, is too long or too deep, or makes too many calls; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Design:
    """A node: a role that answers, or a combination of inner designs."""

    name: str  # a key of COUNTS, or the open name of a role
    counts: tuple[int, ...] = ()  # number of repetitions, number of rounds
    parts: tuple["Design", ...] = ()  # the inner designs; a role has none
    words: str = ""  # the method that a role is given

    def __str__(self) -> str:
        inside = [*map(str, self.counts), *map(str, self.parts), *([f'"{self.words}"'] if self.words else [])]
        return f"{self.name}({', '.join(inside)})" if inside else self.name

    @property
    def calls(self) -> int:
        """The greatest number of calls that it can make."""
        inside = [part.calls for part in self.parts]
        if not inside:
            return 1
        if self.name == "debate":
            return self.counts[0] * (inside[0] + self.counts[1])
        if self.name == "refine":
            return inside[0] + 2 * self.counts[0]
        if self.name == "route":
            return 1 + max(inside)
        times = self.counts[0] if self.counts else 1
        return times * sum(inside) + (self.name in CHIEFS)

    def names(self) -> Iterator[str]:
        """The open names of all roles in it."""
        yield from ([self.name] if not self.parts else [CHIEFS[self.name]] if self.name in CHIEFS else [])
        for part in self.parts:
            yield from part.names()


def read(text: str, most: int = 32, rules: Rules | None = None) -> Design:
    """Parse a design that makes at most `most` calls, to roles for which `rules` has a match; refuse other texts."""
    if len(text) > LONGEST:
        raise DesignError(f"a design of {len(text)} characters is too long: use at most {LONGEST}")
    tokens = _tokens(text.strip())
    design = _design(tokens)
    if tokens:
        raise DesignError(
            f"the design already ends before '{tokens[0][1]}': write one expression, such as vote(3, solve)"
        )
    if design.calls > most:
        raise DesignError(
            f"the design makes up to {design.calls} calls, and {most} are allowed: make it smaller"
        )
    for name in design.names() if rules is not None else ():
        role_of(name, rules or {})
    return design


def canonical(text: str, most: int = 32, rules: Rules | None = None) -> str | None:
    """The design as text, equal for equal designs; None for texts that `read` refuses. A reader for `Call.read`."""
    try:
        return str(read(text, most, rules))
    except DesignError:
        return None


def role_of(name: str, rules: Rules) -> str:
    """The declared role that answers for an open name."""
    for pattern, role in rules.items():
        if fnmatch.fnmatchcase(name, pattern):
            return role
    raise DesignError(
        f"no rule gives '{name}' a role{nearest(name, rules)}; a rule '*' would match all names"
    )


def play(design: Design, task: Any, prompts: Any, rules: Rules) -> Generator[Any, Any, Completion]:
    """`answer = yield from play(...)` inside a workflow; every call has the label `node`, its open name."""
    script = _node(design, task.question, prompts)
    try:
        calls = next(script)
        while True:
            slots: dict[str, int] = {}
            batch = []
            for call in calls:  # they are parallel, so each needs a slot of its own
                role = role_of(call.role, rules)
                slots[role] = slots.get(role, -1) + 1
                batch.append(
                    dataclasses.replace(
                        call, role=role, slot=slots[role], labels={"node": call.role}, keep=True
                    )
                )
            calls = script.send((yield batch))
    except StopIteration as stop:
        return stop.value[0]


# ---------------------------------------------------------------- the text


def _tokens(text: str) -> collections.deque[tuple[str, str]]:
    """The (kind, content) of each token; kinds are name, count, words and mark."""
    tokens, at = collections.deque[tuple[str, str]](), 0
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            raise DesignError(
                f"a design cannot contain {text[at : at + 20]!r}: see marl_jax/workflows/designs.py"
            )
        kind = match.lastgroup or ""
        tokens.append((kind, match[kind]))
        at = match.end()
    return tokens


def _design(tokens: collections.deque[tuple[str, str]], depth: int = 1) -> Design:
    """The design at the beginning of the tokens, which are removed."""
    if depth > DEEPEST:
        raise DesignError(f"the design is nested more than {DEEPEST} deep: make it flatter")
    kind, name = tokens.popleft() if tokens else ("", "nothing")
    if kind != "name":
        raise DesignError(f"a design must begin with a name, not with {name!r}")
    counts: list[int] = []
    parts: list[Design] = []
    words = ""
    if tokens and tokens[0] == ("mark", "("):
        mark = tokens.popleft()
        while mark != ("mark", ")"):
            kind, content = tokens[0] if tokens else ("", "")
            if kind == "name":
                parts.append(_design(tokens, depth + 1))
            elif kind == "count" and not parts:
                counts.append(int(tokens.popleft()[1]))
            elif kind == "words" and not (words or parts or counts):
                words = tokens.popleft()[1]
            else:
                raise DesignError(f"'{name}(' is followed by {content!r}, which cannot be there")
            mark = tokens.popleft() if tokens else ("", "")
            if mark not in (("mark", ","), ("mark", ")")):
                raise DesignError(f"'{name}(' is never closed, or lacks a ',' inside: add what is missing")
    return _checked(Design(name, tuple(counts), tuple(parts), words))


def _checked(design: Design) -> Design:
    name = design.name
    if name not in COUNTS:
        if design.parts or design.counts:
            raise DesignError(f"'{name}(...)' combines no designs{nearest(name, COUNTS)}")
        return design
    low, high = PARTS.get(name, (1, 1))
    if design.words or len(design.counts) != COUNTS[name] or not low <= len(design.parts) <= high:
        example = f"{name}({', '.join(['2'] * COUNTS[name] + ['solve'] * low)})"
        raise DesignError(f"'{design}' has wrong arguments for '{name}': use a form such as {example}")
    if 0 in design.counts:
        raise DesignError(f"'{design}' has a count of 0: it must be at least 1")
    return design


# ---------------------------------------------------------------- the play


def _node(
    design: Design,
    question: str,
    prompts: Any,
    shown: Sequence[Completion] = (),
    plan: Completion | None = None,
) -> Script:
    """Yields lists of calls to open names, receives their completions, returns the draft that is the answer.

    The question contains the texts of the answers in `shown`; roles without words of their own follow the `plan`.
    """
    if not design.parts:
        if words := design.words or (plan.answer if plan else ""):
            ask = prompts.worker(question=question, strategy=words)
        else:
            ask = prompts.generator(question=question)
        reads = [*shown, plan] if plan and not design.words else shown
        return (yield [Call(design.name, ask, reads=reads)])[0], design.name
    run = functools.partial(_node, question=question, prompts=prompts, shown=shown, plan=plan)
    inner, chief = design.parts[0], CHIEFS.get(design.name, "")
    if design.name == "plan":
        ask = prompts.orchestrator(question=question, limit=1)
        new = (yield [Call(chief, ask, reads=shown, read=functools.partial(plan_of, limit=1))])[0]
        return (yield from run(inner, plan=new if new.answer else plan))
    if design.name == "route":
        ask = prompts.aggregator(question=question, candidates=list(map(str, design.parts)))
        choice = (yield [Call(chief, ask, read=functools.partial(pick, n=len(design.parts)))])[0]
        return (yield from run(design.parts[int(choice.answer or 1) - 1]))
    if design.name == "then":
        last = yield from run(inner)
        for part in design.parts[1:]:
            answer = last[0]
            last = yield from run(part, question=f"{question}\n{answer}", shown=[*shown, answer])
        return last
    if design.name == "refine":
        return (yield from _refine(design, question, prompts, run, shown))
    candidates = yield from _together([run(inner) for _ in range(design.counts[0])])
    drafts, names = [draft for draft, _ in candidates], [name for _, name in candidates]
    if design.name == "judge":
        ask = prompts.aggregator(question=question, candidates=drafts)
        choice = (yield [Call(chief, ask, reads=drafts, read=functools.partial(pick, n=len(drafts)))])[0]
        return candidates[int(choice.answer or 1) - 1]
    for _ in range(design.counts[1] if design.name == "debate" else 0):
        asks = []
        for draft, name in zip(drafts, names):
            others = [other for other in drafts if other is not draft]
            asks.append(Call(name, prompts.debater.reply(others=others), after=draft, reads=others))
        drafts = yield asks
    best = majority([draft.answer for draft in drafts])
    return drafts[best], names[best]


def _refine(design: Design, question: str, prompts: Any, run: Any, shown: Sequence[Completion]) -> Script:
    draft, name = yield from run(design.parts[0])
    for _ in range(design.counts[0]):
        ask = prompts.evaluator(question=question, answer=draft)
        review = (yield [Call(CHIEFS["refine"], ask, reads=[*shown, draft], read=verdict)])[0]
        if review.answer == "Correct":
            break
        ask = prompts.generator.refine(critique=review)
        draft = (yield [Call(name, ask, after=draft, reads=[review])])[0]
    return draft, name


def _together(scripts: Sequence[Script]) -> Generator[list[Call], Results, list[Draft]]:
    """Run several scripts in parallel: the calls that they wait for are yielded as one batch."""
    pending = {i: next(script) for i, script in enumerate(scripts)}
    drafts: dict[int, Draft] = {}
    while pending:
        replies = iter((yield [call for calls in pending.values() for call in calls]))
        next_pending = {}
        for i, calls in pending.items():
            try:
                next_pending[i] = scripts[i].send([next(replies) for _ in calls])
            except StopIteration as stop:
                drafts[i] = stop.value
        pending = next_pending
    return [drafts[i] for i in range(len(scripts))]
