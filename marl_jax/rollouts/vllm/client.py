"""Rollouts on a vLLM server beside the run: token ids and log-probs over HTTP, an adapter per policy or all weights.

    submit ──► threads ──► POST /v1/completions ──► tokens and log-probs, checked ──► step
    update ──► folder of a PEFT adapter ──► /v1/load_lora_adapter ──► the name that the next requests ask for
           ──► folder of full weights   ──► /collective_rpc         ──► the salt of the prompts that it caches next

Every update has a folder and a name of its own. vLLM keys cached prompts by both, so none is answered from old weights,
and a `load_inplace`, which vLLM would repeat at every step, is not needed. Full weights replace
those of the server, which is told their name first: one that was started anew, or was sent others, has another name.

Whatever the server does, what leaves here is a whole answer or one `EngineGone` that says what to do. A server that the
run started is started again before that, and what it had not answered is asked again.
"""

import dataclasses
import functools
import itertools
import math
import re
import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging

from marl_jax.models import ModelConfig, forward, save_hf
from marl_jax.models.peft import save_peft
from marl_jax.policies import PolicySpec, Tree
from marl_jax.rollouts.vllm.started import Needed, Started, VllmConfig
from marl_jax.rollouts.vllm.wire import Server
from marl_jax.rollouts.voices import EngineGone
from marl_jax.sampling.requests import Completion, Request, check
from marl_jax.sampling.shapes import EngineSettings
from marl_jax.threads import Workers

__all__ = ["Vllm"]

RESTARTS = 3  # of the run's own server between two updates
LOOK_S = 0.5  # a step without any answer ends after this, so that a run that is asked to stop does
PROBE, PROBE_TOKENS = "What is 12 + 7? Say it: 19.", 16
ALIKE = 0.5  # nats a token: two precisions of one model differ by hundredths, two models by more than this


class Vllm:
    """The engine of policies that decode together. `engines` and `versions` are what `rollout` asks for; drive it from
    one thread."""

    def __init__(
        self,
        specs: Mapping[str, PolicySpec],
        trees: Mapping[str, Tree],
        bases: Mapping[str, Tree],
        config: ModelConfig,
        settings: EngineSettings,
        *,
        server: VllmConfig,
        tokenizer: Any,
        versions: Mapping[str, int] | None = None,
        lora_scale: float = 1.0,
        log: Path | None = None,
    ):
        """`settings` has the longest request, and as its lanes how many are in flight; the server has its own.

        `log` is where a server that is started here writes; None: among the temporary files, where it stays.
        """
        self.settings, self.config = settings, config
        self.engines = dict.fromkeys(specs, self)
        self.versions = {name: (versions or {}).get(name, 0) for name in specs}
        self._scale, self._lora = lora_scale, [name for name, spec in specs.items() if spec.lora]
        self._full = next((name for name, spec in specs.items() if not spec.lora and not spec.frozen), None)
        base = next(iter(specs.values())).base
        rank = trees[self._lora[0]]["q"]["a"].shape[-1] if self._lora else 0
        needed = (base, str(config.dtype), settings.context, len(self._lora), rank, self._full is not None)
        self._needed = Needed(*needed)
        self._chosen, self._held, self._numbers = server, _folder(server.folder), itertools.count()
        log = log or self._folder.with_suffix(".log")
        self._started = Started(server, self._needed, log) if server.start else None
        self._restarts = 0
        try:
            self._connect()
            self._base = self._check_model()
            self._check_tokens(tokenizer)
            if not self._full:
                self._check_logprobs(f"'{base}'", bases[base], tokenizer)
            self._names = dict.fromkeys(specs, self._base)  # policy -> what the server knows its weights as
            self._write(trees)
            self._load()
            if self._full:  # what a server of the user's had before is of no concern
                self._check_logprobs(f"policy {self._full}", self._served(trees[self._full]), tokenizer)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End what was started here, and wait until it has."""
        self._workers.close()
        if self._started is not None:
            self._started.end()

    @property
    def pending(self) -> int:
        """How many requests are not finished."""
        return len(self._jobs)

    def check(self, request: Request) -> None:
        """Refuse, in one line, what is not served."""
        check(request, self.config, self.settings, self._names, None)

    def submit(self, request: Request) -> int:
        """Send a request, at once if not too many are in flight; its completion comes out of a later `step`."""
        self.check(request)
        ticket = next(self._tickets)
        name = self._base if self._full else self._names[request.policy or ""]
        self._asked[ticket] = request, name, self._salt
        self._send(ticket)
        return ticket

    def step(self) -> list[tuple[int, Completion]]:
        """Wait a while for answers; those that are there, in the order of their requests."""
        if not self._jobs:
            return []
        wait(self._jobs.values(), LOOK_S, FIRST_COMPLETED)
        self._workers.give_up()
        done = [ticket for ticket, job in self._jobs.items() if job.done()]
        try:
            found = [(ticket, self._result(self._jobs[ticket])) for ticket in done]
            others = len(done) == len(self._jobs) and self._others()
        except EngineGone as error:
            self._start_again(error)
            return []
        if others:
            raise self._server.gone(
                f"has other weights than it was sent ({others!r:.80}): it was started anew, or another run uses it",
                "give each run a server of its own; the same command loads its weights and makes the step again",
            )
        for ticket in done:
            del self._jobs[ticket], self._asked[ticket]
        return found

    def abandon(self) -> None:
        """Drop all requests. vLLM ends those under way in its own time, and keeps its cached prompts."""
        self._workers.close()
        self._begin()

    @property
    def seconds(self) -> dict[str, float]:
        """The server does not tell what it spends on prefill and what on decode."""
        return {}

    def update(self, trees: Mapping[str, Tree], versions: Mapping[str, int]) -> None:
        """Answer with these weights from the next request on; a frozen policy is the base that the server has."""
        before = dict(self._names)
        self._write(trees)
        self._restarts = 0
        try:
            self._load()
            for policy in self._lora:
                self._server.ask("/v1/unload_lora_adapter", {"lora_name": before[policy]})
        except EngineGone as error:
            self._start_again(error)
        for policy in self._sent:
            shutil.rmtree(self._folder / before[policy], ignore_errors=True)
        self.versions |= versions

    # -- requests -------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._workers = Workers("vllm", self.settings.lanes)
        self._jobs: dict[int, Future[Completion]] = {}
        self._asked: dict[int, tuple[Request, str, str | None]] = {}
        self._tickets = itertools.count()

    def _send(self, ticket: int) -> None:
        call, limit = self._server.complete, self._chosen.timeout
        self._jobs[ticket] = self._workers.submit(call, *self._asked[ticket], limit_s=limit)

    def _result(self, job: "Future[Completion]") -> Completion:
        try:
            return job.result()
        except TimeoutError:
            raise self._server.hangs() from None

    # -- the server and its weights -------------------------------------------------------------------------

    def _connect(self) -> None:
        """To the server that is there, or to a new one."""
        self._begin()
        if self._started is not None:
            url, way_out = self._started.start(), f"see its log, '{self._started.log}'"
        else:
            url = self._chosen.url
            way_out = f"see its log, and start it as '{self._needed.shown(self._chosen, url)}'"
        self._server = Server(url, self._chosen.timeout, way_out)

    def _start_again(self, error: EngineGone) -> None:
        """A new server in the place of the run's own one, with the same adapters, asked for what is not answered."""
        if self._started is None or self._restarts == RESTARTS:
            raise error
        self._restarts += 1
        logging.warning("%s; it is started again", error)
        asked, tickets = self._asked, self._tickets
        self._workers.close()
        self._connect()
        self._load()
        self._asked, self._tickets = asked, tickets
        for ticket in asked:
            self._send(ticket)

    @property
    def _sent(self) -> list[str]:
        """The policies whose weights the server is sent."""
        return [self._full] if self._full else self._lora

    @property
    def _salt(self) -> str | None:
        """The name of the full weights."""
        return self._names[self._full] if self._full else None

    @property
    def _folder(self) -> Path:
        """Where they lie; it goes with this object. Its name is unlike that of any other run on this server."""
        return Path(self._held.name).absolute()

    def _write(self, trees: Mapping[str, Tree]) -> None:
        """The weights of all policies that are trained, under new names."""
        for policy in self._sent:
            name = f"{self._folder.name}-{re.sub(r'[^0-9A-Za-z]', '_', policy)}-{next(self._numbers)}"
            path, alpha = self._folder / name, self._scale * self._needed.rank
            try:
                if policy == self._full:
                    save_hf(path, *_untied(self.config, self._served(trees[policy])))
                else:
                    save_peft(path, self.config, trees[policy], alpha=alpha, base_model=self._base)
            except OSError as error:
                raise EngineGone(
                    f"no weights can be written to '{path}' ({error}): make room there, or name another place in "
                    "engine.vllm.folder"
                ) from None
            self._names[policy] = name

    def _load(self) -> None:
        for name in [self._names[policy] for policy in self._sent]:
            path = str(self._folder / name)
            way_out = f"it has to read '{path}' (engine.vllm.folder); {self._server.way_out}"
            if self._full:
                self._server.ask("/update_weight_version", {"new_version": name}, way_out)
                reload = {"method": "reload_weights", "kwargs": {"weights_path": path}}
                self._server.ask("/collective_rpc", reload, way_out)
            else:
                self._server.ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, way_out)

    def _others(self) -> Any:
        """What the server says of its weights where that is not the name of those that it was sent."""
        if not self._full:
            return None
        found = self._server.ask("/weight_info")
        known = found.get("weight_version") if isinstance(found, dict) else found
        return None if known == self._salt else known or "none"

    def _served(self, tree: Tree) -> Tree:
        """In the numbers that engines compute with, whatever weights are trained in."""
        return jax.tree.map(lambda leaf: leaf.astype(self.config.dtype), tree)

    # -- what is checked before anything is played ----------------------------------------------------------

    def _check_model(self) -> str:
        """The name of the base; the longest request has to fit it."""
        found = self._server.ask("/v1/models")
        cards = found.get("data") if isinstance(found, dict) else None
        whole = [card for card in cards or () if isinstance(card, dict) and not card.get("parent")]
        if not whole or not isinstance(whole[0].get("id"), str):
            raise self._server.gone("serves no model")
        longest = whole[0].get("max_model_len")
        if isinstance(longest, int) and longest < self.settings.context:
            raise self._server.gone(
                f"takes {longest} tokens and a call may have engine.max_prompt + max_new_tokens = "
                f"{self.settings.context}"
            )
        return str(whole[0]["id"])

    def _check_tokens(self, tokenizer: Any) -> None:
        text = {"model": self._base, "prompt": PROBE, "add_special_tokens": False}
        found = self._server.ask("/tokenize", text)
        mine = tokenizer.encode(PROBE, add_special_tokens=False)
        if not isinstance(found, dict) or found.get("tokens") != list(mine):
            raise self._server.gone("has another tokenizer than policies.base")

    def _check_logprobs(self, whose: str, params: Tree, tokenizer: Any) -> None:
        """That log-probs are of the distribution sampled from, and of these weights."""
        prompt = tuple(tokenizer.encode(PROBE, add_special_tokens=False))
        prompt = prompt[: max(1, self.settings.context - PROBE_TOKENS)]
        drawn = Request(prompt, (0,), min(PROBE_TOKENS, self.settings.context - len(prompt)))
        ask = functools.partial(self._server.complete, name=self._base, salt=self._salt)
        certain = ask(dataclasses.replace(drawn, top_k=1))
        if min(certain.logprobs) < -1e-3:  # of the one token that top-k leaves
            raise self._server.gone("gives log-probs of another distribution than it samples from")
        answer = ask(drawn)
        tokens, vocabulary = np.array([*prompt, *answer.tokens]), self.config.vocab_size
        gap = math.inf
        if tokens.max() < vocabulary:
            logits = jax.jit(functools.partial(forward, config=self.config))(params, tokens=tokens[None])
            logp = np.asarray(jax.nn.log_softmax(logits[0]))[len(prompt) - 1 : -1]
            ours = logp[np.arange(len(answer.tokens)), answer.tokens]
            gap = float(np.abs(ours - answer.logprobs).mean())
        if not gap <= ALIKE:
            raise self._server.gone(
                f"answers with other weights than those of {whose}: its log-probs are {gap:.2f} nats a token off"
            )


def _folder(within: str | None) -> "tempfile.TemporaryDirectory[str]":
    try:
        held = tempfile.TemporaryDirectory(prefix="marl_jax_", dir=within, ignore_cleanup_errors=True)
        Path(held.name).chmod(0o755)  # the server may be another user
    except OSError as error:
        raise EngineGone(
            f"engine.vllm.folder is {within!r}, which cannot be written to ({error}): create it, or name another"
        ) from None
    return held


def _untied(config: ModelConfig, params: Tree) -> tuple[ModelConfig, Tree]:
    """The same model with a head of its own: where vLLM reloads tied weights on a processor, it keeps the old head."""
    if not config.tie_word_embeddings:
        return config, params
    return dataclasses.replace(config, tie_word_embeddings=False), params | {
        "lm_head": np.asarray(params["embed"]).T
    }
