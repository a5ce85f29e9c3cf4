"""The run's own scheduler over an engine without a model: the calls of episodes, before there are weights or data.

    tasks ──rollout──► requests ──SilentEngine──► completions of assumed length, with assumed answers

Loops and random branches of a workflow are played as they are. No tool is called: each returns `NO_RESULT`.
"""

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from marl_jax.config.run_fields import RunFields
from marl_jax.models.tokenizer import END, START
from marl_jax.planning.lengths import SPREAD, Lengths, PlanError
from marl_jax.policies import policy_of
from marl_jax.rewards.families import parse
from marl_jax.rollouts.scheduler import rollout
from marl_jax.sampling.requests import Completion, Request
from marl_jax.task import Task
from marl_jax.workflows import Call, Tool, Workflow
from marl_jax.workflows.api import Script

PROBLEMS = 4  # problems of a step that a dry run plays, to see how its rows are packed
EPISODE = 4  # leading parts of a request's key, which name its episode; the path and the call follow
# Chosen, not derived. Lanes planned for some long calls cost cache reads if completions are as long as assumed, and
# save reads if they are longer; tests/planning/test_occupancy.py bounds both.
HEDGE = 6
NO_RESULT = {"passed": False, "reason": ""}
# The text of completions: no answer, no verdict and no choice, but strategies for up to 64 workers.
NO_VERDICT = "\n".join(["STRATEGY 0: ."] * 64)
Say = Callable[[Call, Request], list[int]]


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """Quantities that are unknown before the run."""

    completion: Lengths = SPREAD
    question: int = 128  # tokens
    characters: float = 4.0  # per token
    # {role: {text: probability that a completion begins with it}}; otherwise it begins with `NO_VERDICT`.
    answers: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    tokens_per_second: float = 0.0  # of an engine elsewhere, such as vLLM; 0: the devices of the run sample

    def __post_init__(self) -> None:
        for role, texts in self.answers.items():
            if not (all(p >= 0 for p in texts.values()) and sum(texts.values()) <= 1 + 1e-9):
                raise PlanError(
                    f"answers of '{role}' are {dict(texts)}: give probabilities that add up to at most 1"
                )

    def __str__(self) -> str:
        verdicts = [
            f"{role} '{text}' {p:.0%}" for role, texts in self.answers.items() for text, p in texts.items()
        ]
        ends = f"verdicts are {', '.join(verdicts)}" if verdicts else "no verdict ends an episode early"
        rate = self.tokens_per_second
        elsewhere = f", and an engine elsewhere samples {rate:,.0f} tokens per second" if rate else ""
        return (
            f"completions are {self.completion}, questions {self.question} tokens, "
            f"prompts {self.characters:g} characters per token, {ends}{elsewhere}"
        )


@dataclasses.dataclass(frozen=True)
class PlannedCall:
    """A call as the engine received it."""

    role: str
    slot: int
    policy: str
    episode: tuple[int, ...]
    wave: int  # calls of one wave run side by side
    prompt: tuple[int, ...]
    fed: int  # prompt tokens that are not in a cache
    new: int  # sampled tokens
    first: bool  # it begins a history
    keeps_row: bool  # its history stays cached for a later turn, in a cache row of its own


@dataclasses.dataclass(frozen=True)
class Demand:
    """The calls that the episodes of a few problems make."""

    calls: tuple[PlannedCall, ...]
    problems: int
    assumptions: Assumptions
    longest: tuple[PlannedCall, ...] = ()  # calls of one episode whose completions are as long as allowed
    # The error that ended an episode of made-up tasks, tools and answers; the calls before it count.
    failed: str = ""

    @property
    def most_calls(self) -> int:
        """The most calls of an episode."""
        return max(collections.Counter(call.episode for call in self.calls).values(), default=0)

    def of(self, policies: Sequence[str]) -> list[PlannedCall]:
        """The calls that these policies answer."""
        return [call for call in self.calls if call.policy in policies]

    def lengths(self, policies: Sequence[str]) -> tuple[tuple[int, int], ...]:
        """(prompt, sampled) tokens of calls that lanes are planned for.

        Lengths change as policies learn. Lanes planned for the assumed lengths alone leave a few for all calls that
        turn out longer. So one call of the longest episode is added for every `HEDGE` calls, and each at least once.
        """
        calls = [(len(call.prompt), call.new) for call in self.of(policies)]
        longest = [(len(call.prompt), call.new) for call in self.longest if call.policy in policies]
        return (*calls, *itertools.islice(itertools.cycle(longest), max(len(longest), len(calls) // HEDGE)))

    def histories(self, policies: Sequence[str]) -> int:
        """The most histories of an episode that are kept at a time for these policies."""
        kept = (call.episode for call in self.of(policies) if call.keeps_row)
        return max(collections.Counter(kept).values(), default=0)


def dry_run(
    config: RunFields, workflow: Workflow, prompts: Any, assumptions: Assumptions, problems: int = PROBLEMS
) -> Demand:
    """The calls of a step of the run, played with `problems` of its problems; prompts that are too long are cut.

    If the workflow fails on made-up tasks, tools or answers, only the calls before the failure are returned.
    """
    problems = min(problems, config.data.problems)
    question = "q" * round(assumptions.question * assumptions.characters)
    tasks = [
        Task(str(i), config.data.family, f"{i}{question[1:]}", public_tests=({},)) for i in range(problems)
    ]
    calls, failed = _play(config, workflow, prompts, assumptions, tasks, config.rollout.samples)
    full_length = dataclasses.replace(assumptions, completion=Lengths(1.0, 0.0))
    longest, _ = _play(config, workflow, prompts, full_length, tasks[:1], 1)
    return Demand(calls, problems, assumptions, longest, failed)


def _play(
    config: RunFields,
    workflow: Workflow,
    prompts: Any,
    assumptions: Assumptions,
    tasks: Sequence[Task],
    samples: int,
) -> tuple[tuple[PlannedCall, ...], str]:
    speller, most = Speller(assumptions), config.engine.max_prompt
    calls, failed = play(
        dataclasses.replace(workflow, name=config.workflow.name),
        tasks,
        prompts,
        config.policies.map,
        speller,
        speller.say,
        settings=config.role_settings,
        samples=samples,
        limits=dataclasses.replace(config.rollout.limits, context=None),
    )
    cut = [dataclasses.replace(call, prompt=call.prompt[-most:], fed=min(call.fed, most)) for call in calls]
    return tuple(cut), failed


def play(
    workflow: Workflow,
    tasks: Sequence[Task],
    prompts: Any,
    policy_map: Mapping[str, str],
    tokenizer: Any | Mapping[str, Any],
    say: Say,
    **options: Any,  # of `rollout`
) -> tuple[list[PlannedCall], str]:
    """(every call that the episodes make, the first error that ended one or "").

    `say` returns the completion of a call and its request.
    """
    engine = SilentEngine(say)
    table = rollout(
        _announced(workflow, policy_map, engine),
        tasks,
        engine,
        tokenizer,
        policy_map,
        prompts=prompts,
        parse=parse,
        tool_delay=1,
        ahead=1 << 30,
        **options,
    )
    if engine.trouble:
        raise PlanError(engine.trouble)
    return engine.record, next((bare.error for bare in table.bare_episodes if bare.error), "")


class SilentEngine:
    """An engine without a model: a step answers all waiting requests. The workflow sets the next `calls`."""

    def __init__(self, say: Say):
        self.record: list[PlannedCall] = []
        self.trouble = ""  # a message about the first thing that the configuration lacks
        self.calls: Iterator[Call] = iter(())
        self._say = say
        self._waiting: list[tuple[int, Completion]] = []
        self._wave = 0
        self._fed: set[tuple[str | None, tuple[int, ...]]] = set()
        # (policy, episode) -> prompts with completions that later turns continue
        self._kept: dict[Any, list[tuple[int, ...]]] = collections.defaultdict(list)

    @property
    def pending(self) -> int:
        """Requests that are not answered yet."""
        return len(self._waiting)

    def submit(self, request: Request) -> int:
        """Record a request, and answer it in the next step."""
        call, tokens = next(self.calls), request.tokens
        completion = self._say(call, request)
        episode = request.key[:EPISODE]
        kept = self._kept[request.policy, episode]
        shared = max((len(history) for history in kept if tokens[: len(history)] == history), default=0)
        cached = len(tokens) if (request.policy, tokens) in self._fed else shared
        self._fed.add((request.policy, tokens))
        if request.keep:
            kept.append((*tokens, *completion[:-1]))
        planned = PlannedCall(
            role=call.role,
            slot=call.slot,
            policy=str(request.policy),
            episode=episode,
            wave=self._wave,
            prompt=tokens,
            fed=len(tokens) - cached,
            new=len(completion),
            first=call.after is None,
            keeps_row=request.keep and not shared,
        )
        self.record.append(planned)
        ended = "stop" if len(completion) < request.max_new_tokens else "length"
        self._waiting.append((len(self.record), Completion(completion, [0.0] * len(completion), ended)))  # type: ignore[arg-type]
        return len(self.record)

    def step(self) -> list[tuple[int, Completion]]:
        """Answer all waiting requests."""
        answered, self._waiting = self._waiting, []
        self._wave += 1
        return answered

    def abandon(self) -> None:
        """Drop all waiting requests."""
        self._waiting = []


class Speller:
    """A made-up tokenizer, and completions of its tokens: a token has a fixed number of characters, whatever they are.

    The text that a completion begins with is one token, and the rest is filler: so a completion has the same length in
    a later prompt as when it was sampled.
    """

    def __init__(self, assumptions: Assumptions, text: str = NO_VERDICT):
        self.added_tokens_decoder = {0: SimpleNamespace(content=END, special=True)}
        self._assumptions, self._text = assumptions, text
        answers = (answer for texts in assumptions.answers.values() for answer in texts)
        pieces = sorted({START, END, text, *answers} - {""}, key=len, reverse=True)
        self._one_token = re.compile("|".join((*map(re.escape, pieces), r"<\d+>")))
        self._texts: list[str] = []
        self._ids: dict[str, int] = {}
        self.id_of(END)
        self._spelled = functools.lru_cache(self._spell)  # prompts of episodes repeat the same texts

    def say(self, call: Call, request: Request) -> list[int]:
        """A completion of assumed length that begins with one of the role's answers."""
        answers = {**self._assumptions.answers.get(call.role, {}), self._text: math.inf}
        rng = np.random.default_rng(request.key)
        drawn = rng.random()
        text = next(text for text, p in zip(answers, itertools.accumulate(answers.values())) if drawn < p)
        new = self._assumptions.completion.draw(call.role, request.max_new_tokens, rng)
        new = max(new, request.min_new_tokens)
        unique = self.id_of(f"<{len(self._texts)}>")  # no two completions are equal
        # Always the longest that is allowed, so that it is spelled only once; it is cut below.
        filler = self._spelled("a" * math.ceil(request.max_new_tokens * self._assumptions.characters))
        return [self.id_of(text), unique, *filler][:new]

    def id_of(self, text: str) -> int:
        """The token for the text as one piece."""
        if text not in self._ids:
            self._ids[text] = len(self._texts)
            self._texts.append(text)
        return self._ids[text]

    convert_tokens_to_ids = id_of

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The tokens of a text."""
        ids, at = [], 0
        for match in self._one_token.finditer(text):
            ids += [*self._spelled(text[at : match.start()]), self.id_of(match[0])]
            at = match.end()
        return [*ids, *self._spelled(text[at:])]

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """The text of tokens."""
        return "".join(self._texts[token] for token in tokens if token or not skip_special_tokens)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], **_: Any) -> str:
        """The text of messages, with marks around each."""
        turns = (f"{START}{message['role']}\n{message['content']}{END}\n" for message in messages)
        return "".join((*turns, f"{START}assistant\n"))

    def _spell(self, text: str) -> list[int]:
        each = self._assumptions.characters
        cuts = [int(i * each) for i in range(math.ceil(len(text) / each) + 1)]
        pieces = [text[start:stop] for start, stop in itertools.pairwise(cuts)]
        for piece in dict.fromkeys(pieces):
            self.id_of(piece)
        return [self._ids[piece] for piece in pieces]


def _announced(workflow: Workflow, policy_map: Mapping[str, str], engine: SilentEngine) -> Workflow:
    """The workflow, but it sets the engine's `calls` to those it yields, and its tools return `NO_RESULT`."""

    @functools.wraps(workflow.fn)
    def played(*args: Any, **settings: Any) -> Script:
        script, reply = workflow.fn(*args, **settings), None
        try:
            while True:
                yielded = script.send(reply)
                items = list(yielded) if isinstance(yielded, list | tuple) else [yielded]
                calls = [item for item in items if isinstance(item, Call)]
                engine.trouble = engine.trouble or _trouble(workflow, policy_map, calls)
                engine.calls = iter(calls)
                items = [Tool(lambda: NO_RESULT) if isinstance(item, Tool) else item for item in items]
                reply = yield items if isinstance(yielded, list | tuple) else items[0]
        except StopIteration as stop:
            return stop.value
        finally:
            script.close()

    return dataclasses.replace(workflow, fn=played)


def _trouble(workflow: Workflow, policy_map: Mapping[str, str], calls: Sequence[Call]) -> str:
    """The message about a call that no role or policy answers; "" if all are answered."""
    for call in calls:
        if call.role not in workflow.roles:
            known = ", ".join(workflow.roles)
            return (
                f"workflow.name '{workflow.name}' calls '{call.role}', but declares only: {known}: add it to its "
                "roles, or correct the call"
            )
        try:
            policy_of(policy_map, call.role, call.slot)
        except ValueError:
            return (
                f"policies.map lacks '{call.role}/{call.slot}', which '{workflow.name}' calls: add it, or "
                f"'{call.role}' for all slots without an entry of their own"
            )
    return ""
