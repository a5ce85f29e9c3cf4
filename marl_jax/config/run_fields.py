"""The fields of a run's configuration: each with its type, its default and its bounds, in groups.

`RunConfig` (see `run_config`) is these fields, checked.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from marl_jax.config.phase_fields import Phase
from marl_jax.fields import Count, OptionalCount, Positive, Whole
from marl_jax.learning.estimators.worth import AdvantageConfig
from marl_jax.learning.learner_config import LearnerConfig, Seed
from marl_jax.policies import PolicySpec, SamplingSettings, policy_names, role_settings, trained_policies
from marl_jax.rewards.credit import CreditConfig
from marl_jax.rollouts import Limits
from marl_jax.rollouts.vllm.vllm_config import VllmConfig
from marl_jax.task import Family
from marl_jax.tasks.buffer import BufferConfig
from marl_jax.workflows import find


@dataclasses.dataclass(frozen=True)
class WorkflowConfig:
    """The workflow, its settings (votes, rounds, workers, calls...), and its prompts."""

    name: str = "single"  # a built-in one, or a user's as "module:workflow"
    # Keyword arguments of the workflow, such as votes or rounds.
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prompts: Literal["full", "micro"] = "full"  # which built-in prompts; `micro` for micro models
    prompts_folder: str | None = None  # a folder with the layout of marl_jax/workflows/prompts


@dataclasses.dataclass(frozen=True)
class PoliciesConfig:
    """The policies of the roles, their bases, and which of their weights are trained."""

    map: Mapping[str, str] = dataclasses.field(default_factory=dict)  # role or role/slot -> policy
    frozen_roles: tuple[str, ...] = ()  # roles that do not train; a policy that has only these is frozen
    base: str = ""  # directory of the model that policies start from
    # Policy -> directory, for policies that start from another model: other weights, shape or tokenizer.
    bases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    dtype: Literal["float32", "bfloat16"] | None = None  # None: as the base is stored
    train: Literal["full", "lora"] = "full"  # all weights, or adapters on a frozen base
    # Policy -> full or lora, for policies that are trained differently.
    trains: Mapping[str, Literal["full", "lora"]] = dataclasses.field(default_factory=dict)
    lora_rank: Count = 64  # rank of the adapters
    lora_alpha: Positive = 32.0  # scale of the adapters is alpha / rank
    remat: Literal["none", "layer", "dots"] = "none"  # what the backward pass recomputes, to save memory
    attention: Literal["blocks", "plain"] | None = None  # kernel of the update; None: the platform's fastest

    @property
    def specs(self) -> dict[str, PolicySpec]:
        """{policy: where it starts, and which of its weights are trained}."""
        trained = trained_policies(self.map, self.frozen_roles)
        return {
            name: PolicySpec(
                base=self.bases.get(name, self.base),
                lora=self.trains.get(name, self.train) == "lora" and name in trained,
                frozen=name not in trained,
            )
            for name in policy_names(self.map)
        }


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The problems. `seed` decides which are drawn, or carved out as val; the run's seed decides their order."""

    family: Family = "math"  # how answers are read and graded, and which prompts
    name: str = "micro_math"  # a data set of `marl_jax.tasks`, or your function (split) -> tasks
    directory: str | None = None  # directory of its files; None: downloaded from its publisher
    cache: str | None = None  # where prepared data goes; None: the cache folder, see `user_cache`
    problems: Count = 64  # problems per step
    seed: Seed = 0  # seed for drawing procedural data, or for carving val out of train
    val_size: Annotated[int | None, Ge(0)] = None  # problems of val; 0: none, for runs without evaluation
    train_size: OptionalCount = None  # training problems of procedural data
    test_size: OptionalCount = None  # test problems of procedural data
    # Levels of procedural data, drawn in turn; a level with few distinct problems has fewer.
    levels: tuple[int, ...] = (1, 2, 3)
    bad_rows: Literal["refuse", "skip"] = "refuse"  # what to do with rows of files that cannot be used
    buffer: BufferConfig = dataclasses.field(default_factory=BufferConfig)  # for tasks that calls were about


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How episodes are made."""

    samples: Annotated[int, Ge(1), Le(10_000)] = 8  # episodes per problem; the bound keeps plans quick
    # Above 1, dynamic sampling: problems that teach nothing are sampled again, up to this many times in all.
    draws: Count = 1
    limits: Limits = dataclasses.field(default_factory=Limits)  # limits of one episode
    # `fixed`: tools answer after a fixed number of dispatches, so that runs repeat; `free`: at once.
    mode: Literal["fixed", "free"] = "fixed"
    tool_delay: Count = 4  # number of dispatches after which a tool answers in mode `fixed`
    tool_threads: Count = 8  # tools that run at the same time
    ahead: OptionalCount = None  # episodes begin while fewer requests are unfinished; None: twice the lanes
    # The run ends if at least this share of a rollout's episodes fail; None: it only warns, once.
    max_failed: Annotated[float | None, Gt(0), Le(1)] = 1.0


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The engine's limits; the shapes that follow from them are settled at the first start."""

    kind: Literal["embedded", "vllm"] = "embedded"  # in this process, or a vLLM server, see docs/vllm.md
    vllm: VllmConfig = dataclasses.field(default_factory=VllmConfig)  # settings of the vLLM server
    max_prompt: Count = 512  # prompt tokens; roles with a shorter max_new_tokens may use the difference, too
    lanes: OptionalCount = None  # sequences decoded at once; None: as suits device and memory, vLLM: 256
    # Memory of one engine, working memory included; None: half of a host's free memory, 9/10 of an accelerator's.
    budget_bytes: OptionalCount = None
    steps: OptionalCount = None  # decode steps per dispatch; None: a default of the platform
    # A user's "module:function" that maps tempered logits [lanes, V] to the same with -inf for excluded tokens.
    sampler: str | None = None


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How many devices share the work: on each host `data` copies of the weights, each sharded over `model` devices."""

    data: Count = 1  # copies of the weights in a process, among which lanes and rows are divided
    model: Count = 1  # devices that each copy of the weights is sharded over
    hosts: Count = 1  # processes that share the run, each with its own devices, see docs/hosts.md

    @property
    def devices(self) -> int:
        """The number of devices in all processes."""
        return self.hosts * self.data * self.model


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Evaluations on the val split during training."""

    every: Whole = 10  # steps between two evaluations; 0: never
    problems: Count = 64  # problems of val in one evaluation
    samples: Count = 1  # episodes per problem
    # A user's "module:function" instead of accuracy: it maps the graded table to one value from 0 to 1 per episode.
    # None: the grade of the answer.
    metric: str | None = None
    recorded: Whole = 16  # problems whose episodes an evaluation writes, the same ones each time; 0: none


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save, and what to keep."""

    every: Count = 10  # steps between two checkpoints
    latest: Count = 2  # number of newest ones that are kept, at least 2
    best: bool = True  # keep the one with the best accuracy on val
    keep_every: OptionalCount = None  # also keep the checkpoints whose step is a multiple of this


TRACKERS = ("wandb", "trackio")  # packages, and the fields of `logging` that turn them on


def not_installed(package: str) -> str:
    """The error for a tracker whose package is not installed."""
    return f"logging.{package} is on and {package} is not installed: pip install {package}, or leave it off"


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """What a run records in addition to metrics.jsonl and eval.jsonl."""

    # Episodes of every n-th step, of the first and of the last are written; 0: none.
    episodes_every: Whole = 10
    episodes_problems: Count = 4  # problems of a step whose episodes are written
    # Megabytes of all recorded episodes together: a file that is too large for its share gets fewer problems, and if
    # one problem is too long for it, some files are left out.
    episodes_size: Positive = 50.0
    tensorboard: bool = True  # also write the numbers of metrics.jsonl as event files
    wandb: bool = False  # also send the numbers to Weights & Biases
    trackio: bool = False  # also send the numbers to Trackio, which keeps them on this machine
    wandb_project: str = "marl_jax"  # name of the project in Weights & Biases and Trackio


@dataclasses.dataclass(frozen=True)
class RunFields:
    """All fields of a run."""

    cell: str  # the name under which the run is shown
    workflow: WorkflowConfig  # which workflow, and its prompts
    policies: PoliciesConfig  # which policy answers for which role
    data: DataConfig  # the problems
    sampling: SamplingSettings = dataclasses.field(default_factory=SamplingSettings)  # how roles sample
    # Role -> the fields of `sampling` that differ for it.
    role_sampling: Mapping[str, Mapping[str, Any]] = dataclasses.field(
        default_factory=dict, metadata={"of": SamplingSettings}
    )
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)  # limits of the engine
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)  # devices
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)  # how episodes are made
    rewards: CreditConfig = dataclasses.field(default_factory=CreditConfig)  # rewards of calls
    # What rewards are compared with.
    advantages: AdvantageConfig = dataclasses.field(default_factory=AdvantageConfig)
    # The loss, the optimiser, the batches.
    learner: LearnerConfig = dataclasses.field(default_factory=LearnerConfig)
    # Evaluations on val during training.
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    # When to save, and what to keep.
    checkpoints: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    logging: LogConfig = dataclasses.field(default_factory=LogConfig)  # other records of the run
    alarms: Literal["tell", "stop"] = "tell"  # tell: show alarms; stop: also end the run, see docs/alarms.md
    steps: Whole = 200  # training steps of the whole run
    seed: Seed = 0  # seed of all noise: sampling, order of problems, first adapters
    seeds: Count = 1  # parallel runs, whose seeds count up from `seed`, each in a folder of its own
    # `compiled`: a step is a pure function, see docs/compiled.md; `auto`: compiled if possible and no slower here.
    road: Literal["hosted", "compiled", "auto"] = "hosted"
    phases: tuple[Phase, ...] = ()  # phases in turn, again and again; none: the whole run is one phase

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the workflow."""
        return find(self.workflow.name).roles

    @property
    def role_settings(self) -> dict[str, SamplingSettings]:
        """{role: how it samples}."""
        return role_settings(self.roles, self.sampling, self.role_sampling)
