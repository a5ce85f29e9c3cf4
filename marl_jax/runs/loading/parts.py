"""The parts that a configuration names: bases with their shapes and tokenizers, workflow, prompts, credit, tasks.

    RunConfig ──► Parts (everything that does not change in a run)  +  tasks of a split

Training, evaluation and export begin here. Nothing is compiled; a missing or unfitting part is an error of one line.
"""

import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from marl_jax.config.phase_fields import learner_of
from marl_jax.config.run_config import DataConfig, RunConfig
from marl_jax.errors import UserError
from marl_jax.learning.network import Qwen3
from marl_jax.models import ModelConfig, load_hf
from marl_jax.models.hf import load_config
from marl_jax.models.lora import init_lora
from marl_jax.models.tokenizer import check_vocabulary, load_tokenizer
from marl_jax.models.weight_table import shardings
from marl_jax.own import call_user_function, digest_own, is_own, load_own
from marl_jax.packaged import resolve_path
from marl_jax.policies import PolicySpec, Tree, init_policies
from marl_jax.pretraining.pairs import Pairs, read_pairs
from marl_jax.rewards.credit import Credit, make_credit
from marl_jax.rewards.own_metric import Metric, load_metric
from marl_jax.rollouts import Chat
from marl_jax.rollouts.history import Chats
from marl_jax.rollouts.transcript import Decode
from marl_jax.run_folder.folder import digest_model, digest_tokenizer
from marl_jax.tasks import DataError, Task, load
from marl_jax.tasks.micro import KINDS
from marl_jax.tasks.task_checks import check_tasks, shared
from marl_jax.workflows import Prompts, Workflow, find, load_prompts


class PartsError(UserError, ValueError):
    """A part that a configuration names is missing or does not fit; the text is one line."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a run that never change."""

    specs: dict[str, PolicySpec]  # by policy; the base is its directory
    bases: dict[str, Tree]  # by directory, like the next two
    models: dict[str, ModelConfig]
    tokenizers: dict[str, Any]  # equal tokenizers are one object
    workflow: Workflow
    prompts: Prompts
    credit: Credit
    mesh: Mesh | None
    lora_rank: int
    lora_scale: float | None  # None if no policy has an adapter
    metric: Metric | None = None  # the user's measure of accuracy; None: the grade of the answer
    # {policy: pairs of tokens that its base has seen}, None if the base does not state them.
    pairs: Mapping[str, Pairs | None] = dataclasses.field(default_factory=dict)

    @property
    def alike(self) -> bool:
        """Whether all policies have one shape and one tokenizer, and either all that learn have adapters or none."""
        learning = [self.specs[name] for name in self.trained]
        of_policies = self.of_policies(self.tokenizers).values()
        return (
            len({*self.of_policies(self.models).values()}) == 1
            and len({id(tokenizer) for tokenizer in of_policies}) == 1
            and len({spec.lora for spec in learning}) <= 1
        )

    @property
    def model(self) -> ModelConfig:
        """The shape of all policies, for a run whose policies are alike."""
        return next(iter(self.of_policies(self.models).values()))

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of all policies, for a run whose policies are alike."""
        return next(iter(self.of_policies(self.tokenizers).values()))

    def of_policies(self, by_base: Mapping[str, Any]) -> dict[str, Any]:
        """{policy: the entry of its base}."""
        return {name: by_base[spec.base] for name, spec in self.specs.items()}

    @functools.cached_property
    def decoders(self) -> dict[str, Decode]:
        """{policy: decoder of its tokens, without special ones}."""
        chats = Chats(self.of_policies(self.tokenizers), {}).by_policy
        return {name: chat.decode for name, chat in chats.items()}

    def networks(self, remat: str, attention: str | None) -> dict[str, Qwen3]:
        """{policy: its network for the learner}."""
        return {
            name: Qwen3(model, self.lora_scale if self.specs[name].lora else None, remat, attention)
            for name, model in self.of_policies(self.models).items()
        }

    @property
    def trained(self) -> list[str]:
        """The policies that learn."""
        return [name for name, spec in self.specs.items() if not spec.frozen]

    def start(self, seed: int) -> dict[str, Tree]:
        """{policy: tree} before any update; adapters are drawn from the seed, one after another."""
        keys = dict(zip(self.specs, jax.random.split(jax.random.key(seed), len(self.specs))))
        # Each device of the base gets a copy of its adapters.
        replicated = None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

        def adapter(policy: str) -> Tree:
            fresh = init_lora(keys[policy], self.models[self.specs[policy].base], self.lora_rank, 1)
            return jax.tree.map(lambda leaf: jax.device_put(leaf[0], replicated), fresh)

        return init_policies(self.specs, self.bases, adapter)

    def frozen_trees(self) -> dict[str, Tree]:
        """{policy: tree} of the policies that are served and never change."""
        return {name: self.bases[spec.base] for name, spec in self.specs.items() if spec.frozen}

    def references(self, trees: dict[str, Tree]) -> dict[str, Tree]:
        """{policy: tree of its start} for the policies of `trees`: its base, or an adapter of zeros."""
        return {
            name: jax.tree.map(jnp.zeros_like, tree)
            if self.specs[name].lora
            else self.bases[self.specs[name].base]
            for name, tree in trees.items()
        }

    def adapter_bases(self) -> dict[str, Tree]:
        """{policy: the frozen weights under its adapter}; empty if all weights are trained."""
        return {name: self.bases[self.specs[name].base] for name in self.trained if self.specs[name].lora}


def load_parts(config: RunConfig) -> Parts:
    """Read all parts that the configuration names, except for the tasks."""
    policies = config.policies
    specs = policies.specs
    mesh = make_mesh(config)
    models = {spec.base: _model(spec.base, policies.dtype) for spec in specs.values()}
    tokenizers = _tokenizers(models)
    workflow = find(config.workflow.name)
    adapters = any(spec.lora for spec in specs.values())
    placement = None if mesh is None else lambda model: shardings(model, mesh)
    with _one_line_errors():
        bases = {base: load_hf(base, dtype=policies.dtype, shardings=placement)[1] for base in models}
        pairs = {name: read_pairs(spec.base) for name, spec in specs.items()}
    return Parts(
        specs=specs,
        bases=bases,
        models=models,
        tokenizers=tokenizers,
        workflow=workflow.bind(**config.workflow.settings),
        prompts=read_prompts(config),
        credit=make_credit(config.rewards),
        mesh=mesh,
        lora_rank=policies.lora_rank,
        lora_scale=policies.lora_alpha / policies.lora_rank if adapters else None,
        metric=load_metric(config.evaluation.metric) if config.evaluation.metric else None,
        pairs=pairs,
    )


def model_configs(config: RunConfig) -> dict[str, ModelConfig]:
    """{policy: the shape of its model}, without weights."""
    specs, dtype = config.policies.specs, config.policies.dtype
    models = {base: _model(base, dtype) for base in dict.fromkeys(spec.base for spec in specs.values())}
    _check_copies(config, specs, models)
    return {name: models[spec.base] for name, spec in specs.items()}


def tokenizers_of(config: RunConfig, models: Mapping[str, ModelConfig]) -> dict[str, Any]:
    """{policy: the tokenizer of its model}, without weights."""
    specs = config.policies.specs
    by_base = _tokenizers({spec.base: models[name] for name, spec in specs.items()})
    return {name: by_base[spec.base] for name, spec in specs.items()}


def read_prompts(config: RunConfig) -> Prompts:
    """The prompts; refused if the file of a role of a built-in workflow cannot be read."""
    folder = {} if config.workflow.prompts_folder is None else {"folder": config.workflow.prompts_folder}
    try:
        prompts = load_prompts(config.data.family, config.workflow.prompts, **folder)
        for role in () if is_own(config.workflow.name) else config.roles:
            getattr(prompts, role)
    except (OSError, ValueError, AttributeError) as error:
        raise PartsError(f"workflow.prompts_folder: {error}") from None
    return prompts


def make_mesh(config: RunConfig) -> Mesh | None:
    """The devices of this process that share the work; None for a single one."""
    data, model = config.mesh.data, config.mesh.model
    if data * model == 1:
        return None
    devices = jax.local_devices()
    if config.mesh.hosts > 1 < model and devices[0].platform == "cpu" and "PJRT_NPROC" not in os.environ:
        raise PartsError(
            f"mesh.model is {model} and mesh.hosts {config.mesh.hosts} on CPU, where XLA has one thread a core and "
            "its programs would wait for each other: start all processes with PJRT_NPROC=16"
        )
    if data * model > len(devices):
        here = " in each process" if config.mesh.hosts > 1 else ""
        raise PartsError(
            f"mesh.data {data} x mesh.model {model} needs {data * model} devices{here}; there are {len(devices)}"
        )
    axes, auto, devices = ("data", "model"), (AxisType.Auto,) * 2, devices[: data * model]
    if config.mesh.hosts > 1:  # in the order of `layout.mesh_of_all`; that of JAX differs on some TPUs
        return Mesh(np.array(devices).reshape(data, model), axes, axis_types=auto)
    return jax.make_mesh((data, model), axes, axis_types=auto, devices=devices)


def load_tasks(config: DataConfig, split: str) -> Sequence[Task]:
    """The tasks of a split; an empty split is refused."""
    if is_own(config.name):
        own_tasks = call_user_function(load_own(config.name, "data set"), f"data set '{config.name}'", split)
        tasks: Sequence[Task] = check_tasks(own_tasks, config.name, split, config.family, graded=False)
    else:
        procedural = config.name in KINDS
        tasks = load(
            config.name,
            config.directory,
            split,
            seed=config.seed,
            val_size=None if procedural else config.val_size,
            size=getattr(config, f"{split}_size") if procedural else None,
            levels=config.levels,
            bad_rows=config.bad_rows,
            family=config.family,
            cache=config.cache,
        )
    if not len(tasks):
        raise DataError(f"data set '{config.name}' has no problems in its {split} split: nothing to do")
    return tasks


def check_answers(config: RunConfig, split: str, tasks: Sequence[Task]) -> None:
    """Refuse a user's tasks without gold answers or tests; a user's reward may do without these."""
    if is_own(config.data.name) and not is_own(config.rewards.name):
        check_tasks(tasks, config.data.name, split, config.data.family)


def shared_problems(config: DataConfig, split: str, tasks: Sequence[Task], train: Sequence[Task]) -> str:
    """A warning if problems of an evaluation are also in the training set; else empty."""
    both = shared(tasks, train)
    if not both:
        return ""
    return (
        f"data set '{config.name}': {len(both)} of the {len(tasks)} problems of {split} have a question that is in "
        f"train, too (the first is {tasks[both[0]].id!r}): accuracy on them is not that on new problems"
    )


def digests(config: RunConfig, parts: Parts, splits: dict[str, Sequence[Task]]) -> dict[str, str]:
    """The digests of all that a run depends on besides its configuration."""
    names = {
        "workflow": config.workflow.name,
        "rewards": config.rewards.name,
        "leaves": config.rewards.leaves,
        "data": config.data.name,
        "estimator": config.advantages.estimator,
        "rows": config.advantages.rows or "",
        "loss": config.learner.loss.kind,
        "sampler": config.engine.sampler or "",
        "metric": config.evaluation.metric or "",
    }
    tokenizers = {f"tokenizer {directory}": digest_tokenizer(directory) for directory in parts.bases}
    if len({*tokenizers.values()}) == 1:
        tokenizers = {"tokenizer": next(iter(tokenizers.values()))}
    of_phases = {learner_of(config.learner, phase).loss.kind for phase in config.phases} - {names["loss"]}
    names |= {f"loss {kind}": kind for kind in sorted(of_phases)}
    return {
        **{f"base {directory}": digest_model(directory) for directory in parts.bases},
        **tokenizers,
        "prompts": parts.prompts.digest(),
        **{f"data {split}": data_digest(tasks) for split, tasks in splits.items()},
        **{f"code of {what}": digest_own(name) for what, name in names.items() if is_own(name)},
    }


# ---------------------------------------------------------------- the single parts


def _model(directory: str, dtype: str | None) -> ModelConfig:
    if not resolve_path(directory).is_dir():
        raise PartsError(
            f"there is no model in '{directory}': put one there (config.json, *.safetensors, tokenizer.json), or name "
            "another directory with --config.policies.base or policies.bases"
        )
    with _one_line_errors():
        model = load_config(directory, dtype=dtype)
    return model


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Raise read errors inside as a `PartsError` of one line."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise PartsError(str(error)) from None


def _tokenizers(models: Mapping[str, ModelConfig]) -> dict[str, Any]:
    """Tokenizers by base; tokenizers with equal files are loaded once."""
    loaded: dict[str, Any] = {}
    tokenizers = {}
    for directory, model in models.items():
        digest = digest_tokenizer(directory)
        with _one_line_errors():
            if digest not in loaded:
                loaded[digest] = _tokenizer(directory, model)
            check_vocabulary(loaded[digest], model)
        tokenizers[directory] = loaded[digest]
    return tokenizers


def _tokenizer(directory: str, model: ModelConfig) -> Any:
    tokenizer = load_tokenizer(directory, model)
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer in '{directory}' has no chat template: start from a model that chats"
        )
    Chat(tokenizer)  # refuses a template that histories cannot be continued under
    return tokenizer


def _check_copies(
    config: RunConfig, specs: Mapping[str, PolicySpec], models: Mapping[str, ModelConfig]
) -> None:
    """Refuse a phase that copies a policy to one where its weights would be another model."""
    for number, phase in enumerate(config.phases, 1):
        for to, origin in phase.copies.items():
            target, source = specs[to], specs[origin]
            if models[target.base] != models[source.base] or target.lora != source.lora:
                why = "weights of another form: give both bases of one shape, and adapters both or neither"
            elif target.base != source.base and target.lora:
                why = "its adapter on another base: give both one base, or train them in full"
            elif digest_tokenizer(target.base) != digest_tokenizer(source.base):
                why = "another tokenizer: give both bases of one tokenizer"
            else:
                continue
            raise PartsError(f"phase {phase.name or number} copies '{origin}' to '{to}', which has {why}")


def data_digest(tasks: Sequence[Task]) -> str:
    """The digest of a split's content and order."""
    return getattr(tasks, "digest", None) or hashlib.sha256(repr(list(tasks)).encode()).hexdigest()
