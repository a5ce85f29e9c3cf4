"""The constants of a compiled step: the loaded and checked parts of a configuration that no step changes.

Configurations without a form in arrays are refused here, before anything is compiled.
"""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from marl_jax.compiled.alphabet import Alphabet, alphabet_of
from marl_jax.compiled.refusal import NoArrayForm
from marl_jax.compiled.script import Cue, dry_run
from marl_jax.config.run_config import RunConfig
from marl_jax.learning.estimators.worth import key_of
from marl_jax.learning.losses import OBJECTIVES
from marl_jax.own import is_own
from marl_jax.policies import SamplingSettings
from marl_jax.ragged import padded
from marl_jax.rollouts import Chat
from marl_jax.runs.loading.parts import Parts, load_parts
from marl_jax.tasks.micro import KINDS
from marl_jax.workflows import BUILT_IN


@dataclasses.dataclass(frozen=True, eq=False)
class Cast:
    """The static parts of a step."""

    config: RunConfig
    parts: Parts
    chat: Chat
    alphabet: Alphabet
    settings: Mapping[str, SamplingSettings]  # by role

    @property
    def samples(self) -> int:
        """Episodes per problem."""
        return self.config.rollout.samples

    @property
    def stops(self) -> dict[str, np.ndarray]:
        """Stop tokens {role: int [S]}, padded with -1 to one length."""
        stops = {
            role: dict.fromkeys((*settings.stop_tokens, self.chat.end_of_turn, *self.parts.model.stop_tokens))
            for role, settings in self.settings.items()
        }
        return dict(zip(stops, padded([*map(tuple, stops.values())])))

    def script(self, texts: Mapping[int, str], *, check: bool = True) -> list[list[Cue]]:
        """The calls of an episode, batch by batch; `texts` gives the completions of some calls, by number."""
        parts, family = self.parts, self.config.data.family
        return dry_run(parts.workflow, parts.prompts, self.chat, self.alphabet, family, texts, check=check)


def cast_of(config: RunConfig, parts: Parts | None = None) -> Cast:
    """Load the parts that the configuration names; refuse those that the compiled road cannot take."""
    if not isinstance(config, RunConfig):
        raise TypeError(f"config is {config!r:.80}, not a RunConfig: load_config(...) makes one")
    check_settings(config)
    parts = parts or load_parts(config)
    if not parts.alike:
        raise NoArrayForm("a run whose policies differ in shape, tokenizer or adapters has no form in arrays")
    if parts.workflow.in_arrays is None:
        known = ", ".join(name for name, flow in BUILT_IN.items() if flow.in_arrays is not None)
        raise NoArrayForm(
            f"workflow '{parts.workflow.name}' has no form in arrays (these have: {known}; write one under "
            f"@{parts.workflow.name}.arrays)"
        )
    fields = {*key_of(config.advantages, parts.workflow.groups)}
    if "task" not in fields:
        raise NoArrayForm("advantages over groups of several problems have no form in arrays")
    if unsupported := sorted(fields - {"task", "role", "slot", "turn"}):
        raise NoArrayForm(f"groups by {', '.join(unsupported)} (advantages.group) have no form in arrays")
    alphabet = alphabet_of(parts.tokenizer, parts.model.vocab_size)
    return Cast(config, parts, Chat(parts.tokenizer), alphabet, config.role_settings)


def check_settings(config: RunConfig) -> None:
    """Refuse settings that only the hosted road supports."""
    settings, learner, advantages = config.role_settings.values(), config.learner, config.advantages
    whole_batch, kind = advantages.estimator == "reinforce_pp_baseline", learner.loss.kind
    refused = {
        f"tasks of {config.data.name}": config.data.name not in KINDS,
        "stop strings": any(role.stop_strings for role in settings),
        "top-k and top-p": any(role.top_k or role.top_p < 1 for role in settings),
        "your own sampler (engine.sampler)": config.engine.sampler is not None,
        "a vLLM server (engine.kind)": config.engine.kind == "vllm",
        "a temperature of 0": any(role.temperature == 0 for role in settings),
        "several draws of problems (rollout.draws)": config.rollout.draws > 1,
        "prompts that are cut (rollout.limits.overlong=truncate)": config.rollout.limits.overlong != "refuse",
        f"rewards by {config.rewards.name}": is_own(config.rewards.name),
        f"several updates a step (learner.updates={learner.updates})": learner.updates == "sequences"
        or (learner.updates == "fixed" and learner.updates_fixed > 1),
        "several epochs (learner.epochs)": learner.epochs > 1,
        f"advantages by {advantages.estimator}": is_own(advantages.estimator),
        "advantages over the whole batch (reinforce_pp_baseline)": whole_batch,
        "your own rows (advantages.rows)": advantages.rows is not None,
        f"an objective of whole sequences (learner.loss.kind={kind})": kind in OBJECTIVES,
        "sharding the weights of several seeds over devices (mesh.model)": config.mesh.model > 1
        and config.seeds > 1,
        "a run of several phases": bool(config.phases),
        "a buffer of tasks (data.buffer)": config.data.buffer.capacity > 0,
    }
    for setting, used in refused.items():
        if used:
            raise NoArrayForm(f"there is no form in arrays for {setting}")


def rates(config: RunConfig, policy: str, policies: int) -> jnp.ndarray:
    """Float[n]: the learning rate of a policy by its clock, for all steps of a run; later steps use the last one."""
    schedule = config.learner.schedule_of(policy)
    ticks = max(config.steps, schedule.total_steps, 1) * (policies if schedule.clock != "own" else 1)
    if schedule.kind == "constant":
        ticks = min(ticks, schedule.warmup_steps)
    elif schedule.kind == "linear" or schedule.clamped:
        ticks = min(ticks, schedule.total_steps)
    return jnp.asarray(np.array([schedule(tick) for tick in range(ticks + 1)], np.float32))
