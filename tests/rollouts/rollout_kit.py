"""What the tests of the scheduler share: tasks, a talkative fake model, and `run`."""

import dataclasses
import re

from fake_engine import TOKENIZER, FakeEngine

from marl_jax.policies import shared
from marl_jax.rollouts import rollout
from marl_jax.task import Task
from marl_jax.workflows import (
    Call,
    Prompts,
    Tool,
    ToolError,
    load_prompts,
    workflow,
)

TASKS = [Task(f"t{i}", "math", f"{i}+{i}=?", gold=str(2 * i)) for i in range(6)]
MATH = load_prompts("math", "micro")
PROMPTS = Prompts({"speaker": "## user\n{{text}}\n", "other": "## user\n{{text}}\n"})


def parse(task, text):
    found = re.findall(r"\\boxed\{(.*?)\}", text)
    return found[-1] if found else None


def ragged(prompt, request):
    """Replies of many lengths, a function of the request's key alone."""
    return "x" * (sum(request.key) * 7 % 40) + f"\\boxed{{{sum(request.key) % 3 + 1}}}"


def run(flow, tasks=TASKS, engine=None, policy_map=None, prompts=PROMPTS, parse=parse, **options):
    """The episodes of a rollout."""
    engine = engine or FakeEngine(ragged)
    policy_map = policy_map or shared(flow.roles)
    table = rollout(flow, tasks, engine, TOKENIZER, policy_map, prompts=prompts, parse=parse, **options)
    return table.episodes()


def timeless(episodes):
    return [dataclasses.replace(episode, seconds=0.0) for episode in episodes]


def speak(text="hello", **options):
    return Call("speaker", [{"role": "user", "content": text}], **options)


def tool_user(tool, timeout_s=30.0):
    @workflow(roles=("speaker",))
    def uses_tool(task, prompts):
        first = yield speak(task.question)
        try:
            value = yield Tool(tool, (task.id, first.text), timeout_s=timeout_s)
        except ToolError as error:
            value = f"failed: {error}"
        last = yield speak(str(value), after=first)
        return f"{value} {last.answer}"

    return uses_tool
