"""From policies to engines: which weights answer a policy's calls, and how an update reaches them.

LoRA policies on one base decode in one batch, frozen ones beside them under a zero adapter; a policy that is
trained in full has lanes of its own. Engines compute in the model's dtype, whatever weights are trained in.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from marl_jax.models import ModelConfig
from marl_jax.policies import PolicySpec, Tree, decode_groups, stack
from marl_jax.sampling.engine import Engine
from marl_jax.sampling.shapes import EngineSettings

__all__ = ["Service"]


class Service:
    """The engines of a run. `engines` and `versions` are what `rollout` asks for."""

    def __init__(
        self,
        specs: Mapping[str, PolicySpec],
        trees: Mapping[str, Tree],
        bases: Mapping[str, Tree],
        config: ModelConfig,
        settings: EngineSettings,
        *,
        versions: Mapping[str, int] | None = None,
        lora_scale: float = 1.0,
        to_text: Callable[[Sequence[int]], str] | None = None,
        measured: bool = False,
    ):
        """`versions` counts the updates behind each policy's tree; `measured` settings are taken as they are."""
        self.engines: dict[str, Engine] = {}
        self.versions = {name: (versions or {}).get(name, 0) for name in specs}
        self._specs, self._dtype = dict(specs), config.dtype
        self._groups = decode_groups(specs)
        for group in self._groups:
            params, adapters = self._weights(group, trees)
            engine = Engine(
                bases[specs[group[0]].base] if params is None else params,
                config,
                settings,
                adapters=adapters,
                adapter_scale=lora_scale,
                policies=group,
                to_text=to_text,
                measured=measured,
            )
            self.engines |= dict.fromkeys(group, engine)

    @property
    def settings(self) -> EngineSettings:
        """The shapes of the engines, which are the same for all."""
        return next(iter(self.engines.values())).settings

    def update(self, trees: Mapping[str, Tree], versions: Mapping[str, int]) -> None:
        """Serve these weights from the next request on.

        The caches of frozen policies go too: what a rollout computes must not depend on the ones before it.
        """
        for group in self._groups:
            params, adapters = self._weights(group, trees)
            self.engines[group[0]].update(params=params, adapters=adapters)
        self.versions |= versions

    def _weights(self, group: Sequence[str], trees: Mapping[str, Tree]) -> tuple[Tree | None, Tree | None]:
        """(full weights, stacked adapters) of a group; None stands for the base, and for no adapters."""
        lora = [name for name in group if self._specs[name].lora]
        if lora:
            zeros: Any = jax.tree.map(jnp.zeros_like, trees[lora[0]])
            return None, self._cast(stack({name: trees[name] if name in lora else zeros for name in group}))
        return (None if self._specs[group[0]].frozen else self._cast(trees[group[0]])), None

    def _cast(self, tree: Tree) -> Tree:
        return jax.tree.map(lambda leaf: leaf.astype(self._dtype), tree)
