"""What calls an episode makes, told from the workflow's script without a model."""

import collections
from typing import Any

from marl_jax.learning.groups import group_key
from marl_jax.own import is_own
from marl_jax.runs.run_fields import RunFields
from marl_jax.tasks.task import Task
from marl_jax.workflows import Call, Completion, find
from marl_jax.workflows.walk import walk

SLOTS = {  # {built-in workflow: the role that answers in several slots, and the setting that counts them}
    "voting": ("generator", "votes"),
    "orch_workers": ("worker", "workers"),
    "debate": ("debater", "agents"),
    "single_matched": ("generator", "calls"),
    "single_token_matched": ("generator", "calls"),
}
COUNTED = 10_000  # calls, at most, of a workflow that is walked


def left_open(config: RunFields) -> list[str]:
    """What a config file cannot know and whoever starts a run, not a plan, has to say."""
    matched = "single_token_matched"
    if config.workflow.name != matched or config.workflow.settings.get("tokens") is not None:
        return []
    return [
        f"workflow.settings.tokens of '{matched}' is not given: give --config.workflow.settings.tokens the mean "
        "sampled tokens of an episode of the workflow that it is matched to, 'tokens_per_episode' in its run's "
        "eval.jsonl"
    ]


def compared_by(config: RunFields) -> tuple[str, ...]:
    """What calls have in common whose rewards are compared: the key of a group, or of agent-wise means."""
    chosen = config.advantages
    if chosen.estimator == "agent":
        return ("task",) if chosen.agent_mean == "task" else ("task", "role")
    return group_key(chosen.group, config.workflow.name)


def alone(config: RunFields) -> bool:
    """Whether of a problem that is played once no two calls can be compared."""
    name, key = config.workflow.name, compared_by(config)
    if "task" not in key:
        return False
    if is_own(name):
        return {*key} == {"task", "role", "slot", "turn"}
    calls = [(call.role, call.slot) for call in shortest_episode(config, _Wordless(), said="")]
    many, setting = SLOTS.get(name, ("", ""))
    if config.workflow.settings.get(setting, find(name).settings.get(setting, 1)) != 1:
        calls += [(many, slot) for slot in (0, 1) if (many, slot) not in calls]
    turns: collections.Counter[tuple[str, int]] = collections.Counter()
    groups = []
    for call in calls:
        place = {"task": 0, "role": call[0], "slot": call[1], "turn": turns[call]}
        groups.append(tuple(place[field] for field in key))
        turns[call] += 1
    return len({*groups}) == len(groups)


class _Wordless:
    """Prompts of any role and section, with nothing in them."""

    def __getattr__(self, name: str) -> "_Wordless":
        return self

    def __call__(self, **fields: Any) -> list[dict[str, str]]:
        return [{"role": "user", "content": ""}]


def least_calls(config: RunFields) -> int:
    """How many calls the shortest episode of a built-in workflow makes."""
    return len(shortest_episode(config, _Wordless()))


def shortest_episode(config: RunFields, prompts: Any, said: str = "\\boxed{Correct}") -> list[Call]:
    """The calls of a built-in workflow on an empty question, with empty answers: its first draft is accepted.

    Readers are given what is `said`; with another word nothing is accepted, and the episode is longer.
    """
    settings = dict(config.workflow.settings)
    _, setting = SLOTS.get(config.workflow.name, ("", ""))
    if setting in settings:
        settings[setting] = min(settings[setting], COUNTED)
    if left_open(config):
        settings["tokens"] = 1  # the least that may yet be given
    tokens: Any = {role: range(own.max_new_tokens) for role, own in config.role_settings.items()}

    def accepted(call: Any, index: int) -> Completion:
        return Completion("", tokens[call.role], (), "stop", call.read(said) if call.read else said, index)

    script = find(config.workflow.name)(Task("0", config.data.family, ""), prompts, **settings)
    calls: list[Call] = []
    for turn in walk(script, accepted):
        calls += [call for call in turn if isinstance(call, Call)]
        if len(calls) >= COUNTED:
            break
    return calls
