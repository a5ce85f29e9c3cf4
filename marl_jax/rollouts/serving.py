"""From policies to engines: the weights that serve each policy, and how an update reaches them.

LoRA policies on one base decode in one batch, frozen policies in the same batch with a zero adapter; a policy that is
trained in full has lanes of its own. Engines compute in the model's dtype, whatever the dtype in training. Bases may
have different shapes and tokenizers.
"""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from marl_jax.models import ModelConfig
from marl_jax.policies import PolicySpec, Tree, decode_groups, stack
from marl_jax.rollouts.transcript import Decode
from marl_jax.rollouts.voices import PolicyEngine
from marl_jax.sampling.engine import Engine
from marl_jax.sampling.shapes import EngineSettings

Specs = Mapping[str, PolicySpec]


class Service:
    """The engines of a run. `engines` and `versions` are arguments of `rollout`."""

    def __init__(
        self, specs: Specs, make: Callable[[Specs], PolicyEngine], versions: Mapping[str, int] | None = None
    ):
        """`make` makes the engine of policies that decode together: an `Embedded` one, or a vLLM server's.

        `versions` counts the updates that made each policy's weights.
        """
        self.versions = {name: (versions or {}).get(name, 0) for name in specs}
        self.engines: dict[str, PolicyEngine] = {}
        self._specs = dict(specs)
        try:
            for group in decode_groups(specs):
                engine = make({name: specs[name] for name in group})
                self.engines |= dict.fromkeys(group, engine)
        except BaseException:
            self.close()
            raise

    @property
    def settings(self) -> dict[str, EngineSettings]:
        """The shapes of the engines by base; engines of one base have the same."""
        return {spec.base: self.engines[name].settings for name, spec in self._specs.items()}

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds that callers have spent on prefill and decode, summed over engines; empty where unknown."""
        total = collections.Counter[str]()
        for engine in dict.fromkeys(self.engines.values()):
            total.update(engine.seconds)  # type: ignore[arg-type]
        return dict(total)

    def update(self, trees: Mapping[str, Tree], versions: Mapping[str, int]) -> None:
        """Answer for all policies with these weights from the next request on."""
        for engine in dict.fromkeys(self.engines.values()):
            engine.serve(trees)
        self.versions |= versions

    def close(self) -> None:
        """End the processes that the engines started; no request follows."""
        for engine in dict.fromkeys(self.engines.values()):
            engine.close()


class Embedded(Engine):
    """The engine, in this process, of policies that decode together (see `policies.decode_groups`)."""

    def __init__(
        self,
        specs: Specs,
        trees: Mapping[str, Tree],
        bases: Mapping[str, Tree],
        config: ModelConfig,
        settings: EngineSettings,
        *,
        lora_scale: float = 1.0,
        to_text: Decode | None = None,
        measured: bool = False,
    ):
        """`measured` settings are used as they are."""
        self._specs, self._dtype = specs, config.dtype
        params, adapters = self._weights(trees)
        super().__init__(
            bases[next(iter(specs.values())).base] if params is None else params,
            config,
            settings,
            adapters=adapters,
            adapter_scale=lora_scale,
            policies=tuple(specs),
            to_text=to_text,
            measured=measured,
        )

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds that callers have spent on prefill and decode."""
        return self.watch.seconds

    def serve(self, trees: Mapping[str, Tree]) -> None:
        """Answer with these weights from the next request on.

        Caches of frozen policies are dropped, too: a rollout must not depend on earlier ones.
        """
        params, adapters = self._weights(trees)
        self.update(params=params, adapters=adapters)

    def close(self) -> None:
        """Nothing to end: the engine runs in this process."""

    def _weights(self, trees: Mapping[str, Tree]) -> tuple[Tree | None, Tree | None]:
        """(full weights, stacked adapters); None stands for the base, and for no adapters."""
        if lora := [name for name, spec in self._specs.items() if spec.lora]:
            zeros: Any = jax.tree.map(jnp.zeros_like, trees[lora[0]])
            return None, self._cast(stack({n: trees[n] if n in lora else zeros for n in self._specs}))
        name, spec = next(iter(self._specs.items()))  # one that is trained in full, or frozen ones
        return (None if spec.frozen else self._cast(trees[name])), None

    def _cast(self, tree: Tree) -> Tree:
        return jax.tree.map(lambda leaf: leaf.astype(self._dtype), tree)
