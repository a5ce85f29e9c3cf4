"""What one training step asks for, before there are weights or data: calls, their lengths, micro-batches.

The workflow is walked once, with completions in which nothing can be read, so that no verdict ends it early: the most
calls that an episode makes. How long questions and completions are is assumed, and said with the result.

    workflow -> calls with their prompt and completion tokens -> rows -> micro-batches
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, TypeVar

from marl_jax.learning.batching import Batch, BatchConfig, make_batches
from marl_jax.policies import policy_of
from marl_jax.runs.parts import PartsError, words
from marl_jax.runs.run_config import RunConfig
from marl_jax.table import Table
from marl_jax.tasks.task import Task
from marl_jax.workflows import Call, Completion, Workflow, find
from marl_jax.workflows.walk import walk

T = TypeVar("T")

QUESTION = "{question}"
FRAME = 8  # tokens of the chat template around a message


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """What only the run itself can tell."""

    completion: float  # mean length of a completion, as a share of max_new_tokens
    question: int  # tokens
    characters: float  # per token, of the prompts' texts

    def __str__(self) -> str:
        return (
            f"completions are {self.completion:.0%} of max_new_tokens, questions {self.question} tokens, "
            f"prompts {self.characters:g} characters per token"
        )


def assume(config: RunConfig, completion: float = 0.5) -> Assumptions:
    """What is assumed of a run: the micro tokenizer spells out most words."""
    micro = config.workflow.prompts == "micro"
    return Assumptions(completion, 32 if micro else 128, 1.25 if micro else 4.0)


@dataclasses.dataclass(frozen=True)
class CallShape:
    """One call of an episode, in tokens."""

    role: str
    slot: int
    policy: str
    prompt: int
    fed: int  # of the prompt, behind what an earlier turn left in the cache
    new: int
    same: str | None  # the prompt's text, where all samples of a problem share it; None: it differs
    opens_history: bool  # what it leaves is cached, and grows with later turns of its policy


@dataclasses.dataclass(frozen=True)
class Shape:
    """One kind of micro-batch: `rows` sequences of prefix + branches x length tokens, `sampled` of each in the loss."""

    rows: int
    prefix: int
    length: int
    branches: int
    sampled: int

    @property
    def width(self) -> int:
        return self.prefix + self.branches * self.length

    @property
    def tokens(self) -> int:
        return self.rows * self.width


def calls_of(config: RunConfig, assumptions: Assumptions) -> list[list[CallShape]]:
    """The calls of one episode, those that run side by side together; of one's own workflow as far as it goes."""
    workflow = find(config.workflow.name)
    prompts = words(config)
    task = Task("0", config.data.family, QUESTION, public_tests=({},))
    settings = config.role_settings
    new = {role: max(1, round(assumptions.completion * own.max_new_tokens)) for role, own in settings.items()}
    # Enough strategies for any number of workers.
    lines = "".join(f"\nSTRATEGY {i}: ." for i in range(1, 65))
    said = {role: f"<{role}>{lines}" for role in new}
    lengths = {QUESTION: assumptions.question, **{said[role]: tokens for role, tokens in new.items()}}

    def tokens(text: str) -> float:
        total = 0.0
        for part, length in lengths.items():
            total += text.count(part) * length
            text = text.replace(part, "")
        return total + len(text) / assumptions.characters

    script = workflow(task, prompts, **config.workflow.settings)
    rounds: list[list[CallShape]] = []
    ends: list[int] = []  # tokens of prompt and completion, by call
    cached: list[set[str]] = []  # the policies that hold its history, or the beginning of it, by call

    def shape(call: Call) -> CallShape:
        text = "\n".join(message["content"] for message in call.messages)
        policy = _policy(config, workflow, call)
        before = 0 if call.after is None else ends[call.after.call]
        held = set() if call.after is None else cached[call.after.call]
        cached.append(held | {policy} if call.keep else held)
        prompt = before + round(tokens(text)) + FRAME * len(call.messages)
        prompt = min(prompt, config.engine.max_prompt)
        ends.append(prompt + new[call.role])
        return CallShape(
            call.role,
            call.slot,
            policy,
            prompt,
            prompt - min(before, prompt - 1),
            new[call.role],
            None if call.reads or call.after else text,
            call.keep and policy not in held,
        )

    def answer(entry: Any, index: int) -> Any:
        if not isinstance(entry, Call):
            return {"passed": False, "reason": ""}
        return Completion(said[entry.role], (), (), "length", None, index)

    spent = 0
    for turn in _as_far_as_it_goes(walk(script, answer)):
        spent += len(turn) or 1  # one's own may yield nothing for ever
        if spent > config.rollout.limits.max_calls:
            break
        rounds.append([shape(entry) for entry in turn if isinstance(entry, Call)])
    return rounds


def _policy(config: RunConfig, workflow: Workflow, call: Call) -> str:
    """Who answers a call; that nobody does is a mistake of one's own workflow, or of the map."""
    if call.role not in workflow.roles:
        known = ", ".join(workflow.roles)
        raise PartsError(
            f"workflow.name '{config.workflow.name}' calls '{call.role}', but declares only: {known}: add it to its "
            "roles, or correct the call"
        )
    try:
        return policy_of(config.policies.map, call.role, call.slot)
    except ValueError:
        raise PartsError(
            f"policies.map lacks '{call.role}/{call.slot}', which '{config.workflow.name}' calls: add it, or "
            f"'{call.role}' for all slots without an entry of their own"
        ) from None


def _as_far_as_it_goes(turns: Iterator[T]) -> Iterator[T]:
    """Until a workflow cannot go on from a task and answers that say nothing."""
    try:
        yield from turns
    except KeyboardInterrupt:
        raise
    except BaseException:
        return


def batches_of(
    config: RunConfig, rounds: list[list[CallShape]], policy: str, problems: int
) -> list[tuple[Shape, int]]:
    """The micro-batches that the rows of a policy make, over the calls of `problems` problems: (shape, how many)."""
    ids = itertools.count()
    prompts: dict[Any, range] = {}
    mine = [call for some in rounds for call in some if call.policy == policy]
    rows: list[tuple[CallShape, range]] = []
    for problem in range(problems):
        for sample in range(config.rollout.samples):
            for call in mine:
                key = (problem, call.same) if call.same else (problem, sample, len(rows))
                rows.append((call, prompts.setdefault(key, range(i := next(ids) * 1000, i + call.prompt))))
    counted: dict[Shape, int] = {}
    units = [config.learner.unit(call.role, call.slot) for call, _ in rows]
    table = Table.make(
        role=[call.role for call, _ in rows],
        policy=[policy] * len(rows),
        prompt=[start for _, start in rows],
        tokens=[range(call.new) for call, _ in rows],
        logprobs=[[0.0] * call.new for call, _ in rows],
    )
    for batch in make_batches(table, units, config.learner.batch):
        shape = _shape_of(batch)
        counted[shape] = counted.get(shape, 0) + 1
    return list(counted.items())


def all_shapes(config: BatchConfig, max_prompt: int, max_new: int) -> Iterator[Shape]:
    """Every shape that a full micro-batch may have when calls are as long as allowed."""
    whole = [b for b in config.buckets if b < _first(config.buckets, max_prompt + max_new - 1)]
    for length in (*whole, _first(config.buckets, max_prompt + max_new - 1)):
        rows = _floor_power(max(1, config.token_budget // length))
        yield Shape(rows, 0, length, 1, length)
    if not config.share_prompts:
        return
    room = min(config.tree_limit, config.token_budget)
    for prefix, length in itertools.product(config.buckets, config.buckets):
        if prefix > _first(config.buckets, max_prompt) or length > _first(config.buckets, max_new):
            continue
        branches = 1
        while prefix + branches * length <= room:
            rows = _floor_power(max(1, config.token_budget // (prefix + branches * length)))
            yield Shape(rows, prefix, length, branches, branches * length)
            branches *= 2


def _shape_of(batch: Batch) -> Shape:
    arrays = batch.arrays
    rows, width = arrays.tokens.shape
    length = (width - arrays.prefix) // arrays.branches
    return Shape(rows, arrays.prefix, length, arrays.branches, arrays.targets.shape[1])


def _first(buckets: tuple[int, ...], length: int) -> int:
    return next((bucket for bucket in buckets if bucket >= length), buckets[-1])


def _floor_power(n: int) -> int:
    return 1 << (n.bit_length() - 1)
