"""Weights sent to a server: an adapter of each policy, or all weights of one policy, under a new name at each update.

    trees ──► FOLDER/NAME, PEFT         ──► /v1/load_lora_adapter ──► requests name NAME
          ──► FOLDER/NAME, safetensors  ──► /collective_rpc       ──► NAME is the salt of cached prompts

A name is sent only when its folder is complete, and vLLM keys cached prompts by it, so old weights answer no prompt;
a `load_inplace` of adapters, which vLLM would repeat at every step, is not needed. Full weights replace those of the
server, which gets their name first: a restarted server, or one with other weights, has another name.
"""

import dataclasses
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from marl_jax.models import ModelConfig, save_hf
from marl_jax.models.peft import save_peft
from marl_jax.policies import PolicySpec, Tree
from marl_jax.rollouts.vllm.wire import Server
from marl_jax.rollouts.voices import EngineGone

STARTED = "default"  # what vLLM calls the weights that it was started with


def plain(policy: str) -> str:
    """A policy's name as it appears in file names."""
    return re.sub(r"[^0-9A-Za-z]", "_", policy)


class Weights:
    """The folder of one server, and the weights in it, of policies that decode together (`policies.decode_groups`)."""

    def __init__(
        self, specs: Mapping[str, PolicySpec], config: ModelConfig, scale: float, within: str | None
    ):
        self._specs, self._config, self._scale, self._temporary = specs, config, scale, _folder(within)
        self.lora = [name for name, spec in specs.items() if spec.lora]
        self.full = next((name for name, spec in specs.items() if not spec.lora and not spec.frozen), None)
        self.names: dict[str, str] = {}  # {policy: name of its weights}, trained policies only
        self._numbers = itertools.count()

    @property
    def folder(self) -> Path:
        """The folder, removed with this object. Its name differs from that of any other run on this server."""
        return Path(self._temporary.name).absolute()

    @property
    def salt(self) -> str | None:
        """The name of the full weights, once there is one."""
        return self.names.get(self.full) if self.full else None

    def served(self, tree: Tree) -> Tree:
        """Full weights in the dtype that engines compute in, whatever they are trained in."""
        return jax.tree.map(lambda leaf: leaf.astype(self._config.dtype), tree)

    def write(self, trees: Mapping[str, Tree]) -> dict[str, str]:
        """Write the weights under new names; returns the old names, whose files the caller removes with `drop`."""
        old_names = dict(self.names)
        for policy in [self.full] if self.full else self.lora:
            name = f"{self.folder.name}-{plain(policy)}-{next(self._numbers)}"
            path, tree = self.folder / name, trees[policy]
            try:
                if self.full:
                    save_hf(path, *_untied(self._config, self.served(tree)))
                else:
                    alpha = self._scale * tree["q"]["a"].shape[-1]
                    save_peft(path, self._config, tree, alpha=alpha, base_model=self._specs[policy].base)
            except OSError as error:
                raise EngineGone(
                    f"no weights can be written to '{path}' ({error}): make room there, or name another place in "
                    "engine.vllm.folder"
                ) from None
            self.names[policy] = name
        return old_names

    def load(self, server: Server) -> None:
        """Have the server answer with the weights last written."""
        for name in self.names.values():
            path = str(self.folder / name)
            way_out = f"it must be able to read '{path}' (engine.vllm.folder); {server.way_out}"
            if self.full:
                server.ask("/update_weight_version", {"new_version": name}, way_out)
                reload = {"method": "reload_weights", "kwargs": {"weights_path": path}}
                server.ask("/collective_rpc", reload, way_out)
            else:
                # No name is used twice: it is loaded already if the answer to an earlier request was lost.
                loaded = 400, "already been loaded"
                server.ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, way_out, loaded)

    def unload(self, server: Server, names: Mapping[str, str]) -> None:
        """Have the server unload adapters; a restarted server has none of them."""
        for policy in self.lora:
            server.ask("/v1/unload_lora_adapter", {"lora_name": names[policy]}, ok=(404, ""))

    def drop(self, names: Mapping[str, str]) -> None:
        """Remove the files of these names."""
        for name in names.values():
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def held(self, server: Server, names: Mapping[str, str]) -> bool:
        """Whether the server still has the weights of these names."""
        if self.full:
            return bool(self.known(server) == names[self.full])
        listed = json.dumps(server.ask("/v1/models"))
        return all(json.dumps(name) in listed for name in names.values())

    def known(self, server: Server) -> Any:
        """The server's name of the full weights last sent, or `STARTED`; None for a server that was sent none."""
        # A server that takes no full weights does not have the route.
        answer = server.ask("/weight_info", ok=None if self.full else (404, ""))
        name = answer.get("weight_version") if isinstance(answer, dict) else None
        return name if self.full or name != STARTED else None


def _untied(config: ModelConfig, params: Tree) -> tuple[ModelConfig, Tree]:
    """The same model with a separate head: vLLM on a CPU keeps the old head when it reloads tied weights."""
    if not config.tie_word_embeddings:
        return config, params
    head = np.asarray(params["embed"]).T
    return dataclasses.replace(config, tie_word_embeddings=False), params | {"lm_head": head}


def _folder(within: str | None) -> "tempfile.TemporaryDirectory[str]":
    try:
        parent = within and os.path.expanduser(within)
        temporary = tempfile.TemporaryDirectory(prefix="marl_jax_", dir=parent, ignore_cleanup_errors=True)
        Path(temporary.name).chmod(0o755)  # the server may be another user
    except OSError as error:
        raise EngineGone(
            f"engine.vllm.folder is {within!r}, which cannot be written to ({error}): create it, or name another"
        ) from None
    return temporary
