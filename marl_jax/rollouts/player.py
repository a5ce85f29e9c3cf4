"""A player: a workflow with the engines and policies that answer its calls; built once, it plays any tasks.

    player = player_for(voting, "configs/bases/micro-s")        engines, tokenizer, prompts, weights
    table = player.play(tasks, samples=8, step=1)               the table of their calls
    player.update(trees)                                        new weights answer from the next call on

A run makes its player from its configuration (`runs.loading.play`), a notebook from arguments.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from marl_jax.episodes import Episode
from marl_jax.errors import RunError
from marl_jax.models import ModelConfig, load_hf
from marl_jax.models.tokenizer import load_tokenizer
from marl_jax.packaged import resolve_path
from marl_jax.policies import (
    PolicyMap,
    PolicySpec,
    SamplingSettings,
    Tree,
    init_policies,
    policy_names,
    role_settings,
    shared,
    validate_map,
)
from marl_jax.rewards.families import parse
from marl_jax.rollouts.progress import Progress
from marl_jax.rollouts.running import Limits
from marl_jax.rollouts.scheduler import rollout
from marl_jax.rollouts.serving import Embedded, Service
from marl_jax.rollouts.tools import ToolLog
from marl_jax.rollouts.voices import load_of
from marl_jax.sampling.shapes import plan
from marl_jax.table import Table
from marl_jax.task import Task
from marl_jax.workflows import Prompts, Workflow, find, load_prompts

LONGEST = 512  # tokens of the longest prompt by default, if the model has room for them
MICRO = 1000  # a vocabulary below this many tokens is that of a micro base, which knows the short prompts


class EpisodesFailed(RunError):
    """Too many episodes of a rollout failed for its result to be used; the first traceback is in the text."""


@dataclasses.dataclass(frozen=True)
class Player:
    """The parts of a player that stay the same from one rollout to the next."""

    workflow: Workflow  # the workflow to play
    model: ModelConfig | Mapping[str, ModelConfig]  # shape of all policies, or {policy: shape}
    tokenizer: Any | Mapping[str, Any]  # of all policies, or {policy: tokenizer}
    service: Service  # the engines that answer for all policies
    policies: PolicyMap  # role, or "role/slot" -> policy
    settings: Mapping[str, SamplingSettings]  # by role
    prompts: Prompts | None = None  # None: the built-in prompts of the tasks' family
    limits: Limits = dataclasses.field(default_factory=Limits)  # what ends an episode early
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # mode, tool_delay, ... of `rollout`
    # A rollout with at least this share of failed episodes is an error; None: never.
    max_failed: float | None = 1.0
    answers: bool = False  # a rollout in which no episode returned an answer is an error, too
    initial_weights: Callable[[], dict[str, Tree]] = dict  # makes the weights that `start` returns
    # Sums the progress of all processes that play a share of the rollout.
    combined: Callable[[Progress], Progress] = lambda progress: progress

    def start(self) -> dict[str, Tree]:
        """The weights to train from, {policy: those of its base, in float32}; new copies at every call.

        An update donates the trees that it is given, so keep the trees that it returns and pass them to `update`.
        """
        return self.initial_weights()

    def play(
        self,
        tasks: Iterable[Task],
        *,
        samples: int = 1,
        step: int = 0,
        first_sample: int = 0,
        seed: int = 0,
        tool_log: ToolLog | None = None,
        progress: Callable[[Progress], None] | None = None,
        finished: Callable[[Episode], None] | None = None,
    ) -> Table:
        """The table of `samples` episodes of every task; their noise follows from seed, step, task and sample.

        `finished` is called with each episode as it ends, while others are still sampled: grading can begin.
        """
        tasks, last = list(tasks), Progress(0)
        if odd := [task for task in tasks if not isinstance(task, Task)]:
            raise TypeError(f"a task is {odd[0]!r:.60}: give Task(id=..., family='math', question=...)")
        for task in tasks:
            if wrong := task.fault:
                raise ValueError(f"task {task.id!r:.80} cannot be played: {wrong}")

        def watch(latest: Progress) -> None:
            nonlocal last
            last = latest
            if progress:
                progress(latest)

        table = rollout(
            self.workflow,
            tasks,
            self.service.engines,
            self.tokenizer,
            self.policies,
            prompts=self.prompts or _default_prompts(self.tokenizer, tasks),
            parse=parse,
            samples=samples,
            first_sample=first_sample,
            seed=seed,
            step=step,
            settings=self.settings,
            limits=self.limits,
            versions=self.service.versions,
            tool_log=tool_log,
            progress=watch,
            finished=finished,
            **self.options,
        )
        self._check(self.combined(last))
        return table

    def update(self, trees: Mapping[str, Tree]) -> None:
        """Answer with these weights, {policy: tree}, from the next call on."""
        if missing := [name for name in self.service.versions if name not in trees]:
            raise ValueError(f"trees lacks the policy '{missing[0]}'; it has: {', '.join(trees)}")
        self.service.update(trees, {name: version + 1 for name, version in self.service.versions.items()})

    def _check(self, sums: Progress) -> None:
        name, limit = self.workflow.name, self.max_failed
        if limit is not None and sums.failed and sums.failed >= limit * sums.episodes:
            count = (
                f"all {sums.failed}" if sums.failed == sums.episodes else f"{sums.failed} of {sums.episodes}"
            )
            raise EpisodesFailed(
                f"workflow '{name}': {count} episodes ended in an error (max_failed is {limit:g}); the first:\n"
                f"{sums.first_error.rstrip()}"
            )
        if self.answers and sums.episodes and sums.silent == sums.episodes:
            raise EpisodesFailed(
                f"workflow '{name}' returned nothing in all {sums.episodes} episodes: return its answer, a Completion "
                "or a text"
            )


def player_for(
    workflow: Workflow | str,
    base: str | os.PathLike[str],
    *,
    policies: PolicyMap | None = None,
    prompts: Prompts | None = None,
    sampling: SamplingSettings | Mapping[str, SamplingSettings] | None = None,
    max_prompt: int | None = None,
    lanes: int | None = None,
    dtype: str | None = "float32",
) -> Player:
    """The player of a workflow whose policies all start from one model.

    Args:
      workflow: one of `marl_jax.workflows`, by object or by name, or your own.
      base: the directory of the model; `configs/bases/...` are found in the package, too.
      policies: role, or "role/slot" -> policy, such as `policies.isolated(workflow.roles)`; None: one for all roles.
      prompts: prompts of the roles; None: the built-in prompts for the tasks and the size of the base.
      sampling: how every role samples, or {role: settings}; None: 64 new tokens at temperature 1.
      max_prompt: longest prompt in tokens; None: 512, or as many as the model has room for.
      lanes: calls that are answered at the same time; None: as many as keep the device busy.
      dtype: of the weights that answer; None: that of the stored base. Trained weights are float32, see `Player.start`.
    """
    workflow = find(workflow) if isinstance(workflow, str) else workflow
    if not isinstance(workflow, Workflow):
        raise TypeError(f"workflow is {workflow!r:.80}: decorate its function with @workflow(roles=...)")
    policies = shared(workflow.roles) if policies is None else policies
    try:
        validate_map(policies, workflow.roles)
    except ValueError as error:
        raise ValueError(f"policies: {error}") from None
    settings = _settings(workflow, sampling)
    base = os.fspath(resolve_path(base))
    if not Path(base).is_dir():
        raise ValueError(
            f"base is '{base}', which is no directory: give that of a model (config.json, *.safetensors)"
        )
    model, params = load_hf(base, dtype=dtype)
    tokenizer = load_tokenizer(base, model)
    new = max(role.max_new_tokens for role in settings.values())
    room = model.max_position_embeddings - new
    if room < 1:
        raise ValueError(
            f"max_new_tokens is {new}; the model has {model.max_position_embeddings} positions, for prompt and "
            "completion together"
        )
    if max_prompt is not None and not 1 <= max_prompt <= room:
        raise ValueError(
            f"max_prompt is {max_prompt}; max_new_tokens={new} leaves room for 1 to {room} tokens in the model"
        )
    load = load_of(settings.values(), max_prompt or min(LONGEST, room), ends=len(model.stop_tokens))
    shapes, limits = plan(model, load, lanes=lanes), Limits(context=load.max_prompt + new)
    specs = {name: PolicySpec(base) for name in policy_names(policies)}
    start = functools.partial(init_policies, specs, {base: params})
    trees, bases, to_text = start(), {base: params}, tokenizer.decode
    service = Service(specs, lambda own: Embedded(own, trees, bases, model, shapes, to_text=to_text))
    return Player(
        workflow, model, tokenizer, service, policies, settings, prompts, limits=limits, initial_weights=start
    )


def _settings(
    workflow: Workflow, sampling: SamplingSettings | Mapping[str, SamplingSettings] | None
) -> dict[str, SamplingSettings]:
    if isinstance(sampling, Mapping):
        if {*sampling} != {*workflow.roles}:
            raise ValueError(f"sampling is for {sorted(sampling)}; the roles are {sorted(workflow.roles)}")
        settings = dict(sampling)
    else:
        settings = role_settings(workflow.roles, sampling or SamplingSettings(max_new_tokens=64))
    sampling_roles = {role: chosen for role, chosen in settings.items() if chosen.temperature > 0}
    if any(chosen.top_p < 1 or chosen.top_k for chosen in sampling_roles.values()):
        for role in (role for role, chosen in sampling_roles.items() if not chosen.top_k):
            raise ValueError(
                f"sampling of role '{role}' has top_k 0, and top_p or top_k leaves out tokens: training renormalises "
                "over what was kept, so set top_k to the most tokens to keep, such as 64"
            )
    for role, chosen in sampling_roles.items():
        if chosen.min_new_tokens and not chosen.top_k:
            raise ValueError(
                f"sampling of role '{role}' has min_new_tokens {chosen.min_new_tokens} and top_k 0: training cannot "
                "know which tokens could not end the answer, so set top_k to the most tokens to keep, such as 64"
            )
    return settings


def _default_prompts(tokenizer: Any, tasks: Sequence[Task]) -> Prompts:
    families = dict.fromkeys(task.family for task in tasks)
    if len(families) > 1:
        raise ValueError(
            f"tasks are of {' and '.join(families)}, which differ in their prompts: play them apart, or give prompts="
        )
    return load_prompts(tasks[0].family if tasks else "math", "micro" if len(tokenizer) < MICRO else "full")
