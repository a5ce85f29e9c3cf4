"""The servers of a run: one for each base with adapters, and one for each policy that is trained in full."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marl_jax.models import ModelConfig
from marl_jax.policies import PolicySpec, Tree, by_name, decode_groups
from marl_jax.rollouts.vllm.client import Vllm
from marl_jax.rollouts.vllm.started import VllmConfig, urls_of
from marl_jax.rollouts.vllm.weights import plain
from marl_jax.rollouts.voices import Engines
from marl_jax.sampling.shapes import EngineSettings

__all__ = ["Servers", "connect"]


def connect(
    specs: Mapping[str, PolicySpec],
    trees: Mapping[str, Tree],
    bases: Mapping[str, Tree],
    models: Mapping[str, ModelConfig],
    settings: EngineSettings | Mapping[str, EngineSettings],
    *,
    server: VllmConfig,
    tokenizers: Mapping[str, Any],
    log: Path | None = None,
    **options: Any,
) -> Engines:
    """The engines of all policies. Models, settings and tokenizers are by base; several servers have a log each.

    `options` are of `Vllm`.
    """
    groups, made = decode_groups(specs), list[Vllm]()
    shapes = by_name(settings, bases)
    try:
        for group, url in zip(groups, urls_of(server) or [""] * len(groups), strict=True):
            base = specs[group[0]].base
            made.append(
                Vllm(
                    {name: specs[name] for name in group},
                    trees,
                    bases,
                    models[base],
                    shapes[base],
                    server=dataclasses.replace(server, url=url),
                    tokenizer=tokenizers[base],
                    log=log
                    if log is None or len(groups) == 1
                    else log.with_stem(f"{log.stem}-{plain(group[0])}"),
                    **options,
                )
            )
    except BaseException:
        for one in made:
            one.close()
        raise
    return made[0] if len(made) == 1 else Servers(made)


class Servers:
    """Several servers as one."""

    def __init__(self, made: list[Vllm]):
        self._made, self.settings = made, made[0].settings
        self.engines = {name: one for one in made for name in one.engines}
        self.versions = {name: version for one in made for name, version in one.versions.items()}

    @property
    def seconds(self) -> dict[str, float]:
        """As each of them says: nothing."""
        return {}

    def update(self, trees: Mapping[str, Tree], versions: Mapping[str, int]) -> None:
        """Each is sent the weights of its own policies."""
        for one in self._made:
            one.update(trees, versions)
        self.versions |= versions

    def close(self) -> None:
        """End what was started here."""
        for one in self._made:
            one.close()
