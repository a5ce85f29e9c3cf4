"""Voices: the policy and engine that answer a call of a role and slot, and the role's sampling settings."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from marl_jax.errors import RunError
from marl_jax.policies import (
    PolicyMap,
    SamplingSettings,
    Tree,
    policy_names,
    policy_of,
    role_settings,
    validate_map,
)
from marl_jax.rollouts.history import Chats
from marl_jax.rollouts.running import Ask
from marl_jax.sampling.programs import Features
from marl_jax.sampling.requests import Request
from marl_jax.sampling.shapes import EngineSettings, Load
from marl_jax.workflows.api import Workflow


def load_of(
    roles: Collection[SamplingSettings], max_prompt: int, sampler: str | None = None, ends: int = 0
) -> Load:
    """The load of these roles on an engine; `ends` counts the model's stop tokens."""
    truncate = any(role.top_p < 1 or role.top_k > 0 for role in roles)
    features = Features(
        truncate=truncate,
        # The kept ids that the trainer renormalises over.
        candidates=max((role.top_k for role in roles if role.temperature > 0), default=0) if truncate else 0,
        min_new=any(role.min_new_tokens > 0 for role in roles),
        sampler=sampler,
    )
    longest = max(role.max_new_tokens for role in roles)
    stops = max(8, *(len(role.stop_tokens) + 1 + ends for role in roles))  # 1 for the template's end of turn
    return Load(max_prompt, longest, features=features, stops=stops)


class Engine(Protocol):
    """The interface of an engine to the scheduler."""

    @property
    def pending(self) -> int:
        """Requests that are queued or being decoded."""

    def submit(self, request: Request) -> int:
        """Queue a request; returns its ticket."""

    def step(self) -> Sequence[tuple[int, Any]]:
        """One dispatch; the (ticket, completion) pairs that it finished."""

    def abandon(self) -> None:
        """Drop all requests and cached prompts; the engine is then like a new one."""


class PolicyEngine(Engine, Protocol):
    """The interface of an engine to a run: embedded (`serving`), or a vLLM server (`vllm`)."""

    @property
    def settings(self) -> EngineSettings:
        """Its shapes: the longest request, the kinds of sampling."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds that callers spent on `prefill` and `decode` so far; empty where unknown."""

    def serve(self, trees: Mapping[str, Tree]) -> None:
        """Answer for its policies with these weights from the next request on."""

    def close(self) -> None:
        """End processes that it started; no request follows."""


class EngineGone(RunError):
    """An engine outside of this process cannot be used; policies and learner are intact, and can be saved."""


class Voices:
    """The policy map, engines and settings of one rollout, checked before anything runs."""

    def __init__(
        self,
        workflow: Workflow,
        policy_map: PolicyMap,
        engines: Engine | Mapping[str, Engine],
        settings: SamplingSettings | Mapping[str, SamplingSettings],
        chats: Chats,
        versions: Mapping[str, int],
    ):
        validate_map(policy_map, workflow.roles)
        policies = policy_names(policy_map)
        by_policy = engines if isinstance(engines, Mapping) else dict.fromkeys(policies, engines)
        if missing := [policy for policy in policies if policy not in by_policy]:
            raise ValueError(f"no engine serves the policy '{missing[0]}'; there is: {', '.join(by_policy)}")
        by_role = settings if isinstance(settings, Mapping) else role_settings(workflow.roles, settings)
        if set(by_role) != set(workflow.roles):
            raise ValueError(
                f"sampling settings are for {sorted(by_role)}, the roles are {sorted(workflow.roles)}"
            )
        self._by_role = by_role
        self._settings: dict[tuple[str, str], SamplingSettings] = {}
        for key, policy in policy_map.items():
            role, engine = key.split("/")[0], by_policy[policy]
            of_model = engine.config.stop_tokens if hasattr(engine, "config") else ()
            stops = (*by_role[role].stop_tokens, chats.by_policy[policy].end_of_turn, *of_model)
            chosen = dataclasses.replace(by_role[role], stop_tokens=tuple(dict.fromkeys(stops)))
            self._settings[role, policy] = chosen
            if hasattr(engine, "check"):  # refuses settings that it cannot serve with any prompt
                try:
                    engine.check(Request((0,), (), policy=policy, **vars(chosen)))
                except ValueError as error:
                    raise ValueError(f"role '{role}' cannot answer: {error}") from None
        self.policy_map, self.versions, self._engine_of = policy_map, versions, by_policy
        # By identity: an engine of one's own may have no hash.
        self.engines = list({id(by_policy[policy]): by_policy[policy] for policy in policies}.values())

    def clear_engines(self) -> None:
        """Drop the prompts that the engines cached; engines with requests under way are refused."""
        if busy := max(engine.pending for engine in self.engines):
            raise RuntimeError(f"an engine has {busy} requests under way: finish or abandon() them")
        self.abandon()

    def abandon(self) -> None:
        """Drop all requests and cached prompts."""
        for engine in self.engines:
            engine.abandon()

    @property
    def context(self) -> int | None:
        """The shortest context of the engines that state theirs."""
        known = [engine.settings.context for engine in self.engines if hasattr(engine, "settings")]
        return min(known, default=None)

    def new_tokens(self, role: str) -> int:
        """The longest completion of a role."""
        return self._by_role[role].max_new_tokens

    def submit(self, ask: Ask, key: tuple[int, ...]) -> tuple[Engine, int, dict[str, Any]]:
        """Submit a call; returns (engine, ticket, facts for the record)."""
        role, slot = ask.call.role, ask.call.slot
        policy = policy_of(self.policy_map, role, slot)
        chosen, engine = self._settings[role, policy], self._engine_of[policy]
        key = (*key, *ask.path, ask.index)
        request = Request(ask.prompt, key, policy=policy, keep=ask.call.keep, **vars(chosen))
        facts = {"policy": policy, "version": self.versions.get(policy, 0), "temperature": chosen.temperature}
        return engine, engine.submit(request), facts
