"""The servers of a run: one for each base with adapters, and one for each policy that is trained in full."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marl_jax.models import ModelConfig
from marl_jax.policies import PolicySpec, Tree, decode_groups
from marl_jax.rollouts.vllm.client import Vllm
from marl_jax.rollouts.vllm.vllm_config import VllmConfig, urls_of
from marl_jax.rollouts.vllm.weights import plain
from marl_jax.sampling.shapes import EngineSettings


class Servers:
    """The engines of all policies. `options` are passed to `Vllm`; models, settings and tokenizers are by base."""

    def __init__(
        self,
        specs: Mapping[str, PolicySpec],
        models: Mapping[str, ModelConfig],
        settings: Mapping[str, EngineSettings],
        server: VllmConfig,
        tokenizers: Mapping[str, Any],
        log: Path | None = None,
        versions: Mapping[str, int] | None = None,
        **options: Any,
    ):
        self.settings, self.engines = settings, dict[str, Vllm]()
        self.versions = {name: (versions or {}).get(name, 0) for name in specs}
        groups = decode_groups(specs)
        try:
            for group, url in zip(groups, urls_of(server) or [""] * len(groups), strict=True):
                base = specs[group[0]].base
                path = log and log.with_stem(f"{log.stem}-{plain(group[0])}") if len(groups) > 1 else log
                engine = Vllm(
                    {name: specs[name] for name in group},
                    config=models[base],
                    settings=settings[base],
                    server=dataclasses.replace(server, url=url),
                    tokenizer=tokenizers[base],
                    log=path,
                    **options,
                )
                self.engines |= dict.fromkeys(group, engine)
        except BaseException:
            self.close()
            raise

    @property
    def seconds(self) -> dict[str, float]:
        """Empty: a server does not report its times of prefill and decode."""
        return {}

    def update(self, trees: Mapping[str, Tree], versions: Mapping[str, int]) -> None:
        """Send each server the weights of its policies."""
        for engine in dict.fromkeys(self.engines.values()):
            engine.update(trees)
        self.versions |= versions

    def close(self) -> None:
        """End the servers that were started here."""
        for engine in dict.fromkeys(self.engines.values()):
            engine.close()
