"""From policies to engines: the weights that serve each policy, and how an update reaches them.

LoRA policies on one base decode in one batch, frozen policies in the same batch with a zero adapter; a policy that is
trained in full has lanes of its own. Engines compute in the model's dtype, whatever the dtype in training. Bases may
have different shapes and tokenizers: then models, settings and decoders are given by base.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from marl_jax.models import ModelConfig
from marl_jax.policies import PolicySpec, Tree, decode_groups, per_name, stack
from marl_jax.rollouts.transcript import Decode
from marl_jax.sampling.engine import Engine
from marl_jax.sampling.shapes import EngineSettings


class Service:
    """The engines of a run. `engines` and `versions` are arguments of `rollout`."""

    def __init__(
        self,
        specs: Mapping[str, PolicySpec],
        trees: Mapping[str, Tree],
        bases: Mapping[str, Tree],
        config: ModelConfig | Mapping[str, ModelConfig],
        settings: EngineSettings | Mapping[str, EngineSettings],
        *,
        versions: Mapping[str, int] | None = None,
        lora_scale: float = 1.0,
        to_text: Decode | Mapping[str, Decode] | None = None,
        measured: bool = False,
    ):
        """`versions` counts the updates that made each policy's tree; `measured` settings are used as they are.

        `config`, `settings` and `to_text` are one for all bases, or {base: ...}.
        """
        self.engines: dict[str, Engine] = {}
        self.versions = {name: (versions or {}).get(name, 0) for name in specs}
        self._specs, base_names = dict(specs), [spec.base for spec in specs.values()]
        self._models = per_name(config, base_names)
        shapes, texts = per_name(settings, base_names), per_name(to_text, base_names)
        self._groups = decode_groups(specs)
        for group in self._groups:
            params, adapters = self._weights(group, trees)
            base = specs[group[0]].base
            engine = Engine(
                bases[base] if params is None else params,
                self._models[base],
                shapes[base],
                adapters=adapters,
                adapter_scale=lora_scale,
                policies=group,
                to_text=texts[base],
                measured=measured,
            )
            self.engines |= dict.fromkeys(group, engine)

    @property
    def settings(self) -> dict[str, EngineSettings]:
        """The shapes of the engines by base; engines of one base have the same."""
        return {spec.base: self.engines[name].settings for name, spec in self._specs.items()}

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds that callers have spent on prefill and decode, summed over engines."""
        total: dict[str, float] = {}
        for engine in {*self.engines.values()}:
            for part, seconds in engine.watch.seconds.items():
                total[part] = total.get(part, 0.0) + seconds
        return total

    def update(self, trees: Mapping[str, Tree], versions: Mapping[str, int]) -> None:
        """Serve these weights from the next request on.

        Caches of frozen policies are dropped, too: a rollout must not depend on earlier ones.
        """
        for group in self._groups:
            params, adapters = self._weights(group, trees)
            self.engines[group[0]].update(params=params, adapters=adapters)
        self.versions |= versions

    def close(self) -> None:
        """Nothing to end: the engines run in this process."""

    def _weights(self, group: Sequence[str], trees: Mapping[str, Tree]) -> tuple[Tree | None, Tree | None]:
        """(full weights, stacked adapters) of a group; None stands for the base, and for no adapters."""
        lora = [name for name in group if self._specs[name].lora]
        if lora:
            zeros: Any = jax.tree.map(jnp.zeros_like, trees[lora[0]])
            stacked = stack({name: trees[name] if name in lora else zeros for name in group})
            return None, self._cast(stacked, group[0])
        return (None if self._specs[group[0]].frozen else self._cast(trees[group[0]], group[0])), None

    def _cast(self, tree: Tree, policy: str) -> Tree:
        dtype = self._models[self._specs[policy].base].dtype
        return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)
