"""Rollouts on a vLLM server that is started beside the run: token ids and log-probs over HTTP, an adapter per policy.

    submit ──► threads ──► POST /v1/completions ──► tokens and log-probs, checked ──► step
    update ──► folder of a PEFT adapter ──► /v1/load_lora_adapter ──► the name that the next requests ask for

Every update has a folder and a name of its own. vLLM keys cached prompts by both, so none is answered from old weights,
and a `load_inplace`, which vLLM would repeat at every step, is not needed.

Whatever the server does, what leaves here is a whole answer or one `EngineGone` that says what to do.
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

from marl_jax.models import ModelConfig, forward
from marl_jax.models.peft import save_peft
from marl_jax.policies import PolicySpec, Tree
from marl_jax.rollouts.vllm_server import SERVE, Server, VllmConfig
from marl_jax.rollouts.voices import EngineGone
from marl_jax.sampling.requests import Completion, Request, check
from marl_jax.sampling.shapes import EngineSettings
from marl_jax.threads import Workers

__all__ = ["Vllm"]

LOOK_S = 0.5  # a step without any answer ends after this, so that a run that is asked to stop does
PROBE, PROBE_TOKENS = "What is 12 + 7? Say it: 19.", 16
ALIKE = 0.5  # nats a token: two precisions of one model differ by hundredths, two models by more than this


class Vllm:
    """The engine of all policies. `engines` and `versions` are what `rollout` asks for; drive it from one thread."""

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
    ):
        """`settings` has the longest request, and as its lanes how many are in flight; the server has its own."""
        self.settings, self.config = settings, config
        self.engines = dict.fromkeys(specs, self)
        self.versions = {name: (versions or {}).get(name, 0) for name in specs}
        self._specs, self._scale = dict(specs), lora_scale
        self._server, self._timeout = Server(server), server.timeout
        self._start()
        base = _only_base(specs)
        self._base = self._check_model()
        self._check_tokens(tokenizer)
        self._check_logprobs(base, bases[base], tokenizer)
        self._names = dict.fromkeys(specs, self._base)  # policy -> what the server knows it as
        self._folder, self._numbers = _folder(server.folder), itertools.count()
        self.update(trees, self.versions)

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
        return self._submit(request, self._names[request.policy or ""])

    def step(self) -> list[tuple[int, Completion]]:
        """Wait a while for answers; those that are there, in the order of their requests."""
        if not self._jobs:
            return []
        wait(self._jobs.values(), LOOK_S, FIRST_COMPLETED)
        self._workers.give_up()
        done = [ticket for ticket, job in self._jobs.items() if job.done()]
        return [(ticket, self._result(self._jobs.pop(ticket))) for ticket in done]

    def abandon(self) -> None:
        """Drop all requests. vLLM ends those under way in its own time, and keeps its cached prompts."""
        self._workers.close()
        self._start()

    def update(self, trees: Mapping[str, Tree], versions: Mapping[str, int]) -> None:
        """Answer with these adapters from the next request on; a frozen policy is the base that the server has."""
        before = [name for name in self._names.values() if name != self._base]
        for policy in (policy for policy, spec in self._specs.items() if spec.lora):
            name = f"{self._folder.name}-{re.sub(r'[^0-9A-Za-z]', '_', policy)}-{next(self._numbers)}"
            self._load(name, trees[policy])
            self._names[policy] = name
        for name in before:
            self._server.ask("/v1/unload_lora_adapter", {"lora_name": name})
            shutil.rmtree(self._folder.path / name, ignore_errors=True)
        self.versions |= versions

    # -- requests -------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._workers = Workers("vllm", self.settings.lanes)
        self._jobs: dict[int, Future[Completion]] = {}
        self._tickets = itertools.count()

    def _submit(self, request: Request, name: str) -> int:
        ticket = next(self._tickets)
        self._jobs[ticket] = self._workers.submit(self._server.complete, request, name, limit_s=self._timeout)
        return ticket

    def _result(self, job: "Future[Completion]") -> Completion:
        try:
            return job.result()
        except TimeoutError:
            raise self._server.hangs() from None

    def _load(self, name: str, tree: Tree) -> None:
        path, rank = self._folder.path / name, tree["q"]["a"].shape[-1]
        try:
            save_peft(path, self.config, tree, alpha=self._scale * rank, base_model=self._base)
        except OSError as error:
            raise EngineGone(f"no adapter can be written to '{path}' ({error}): make room there") from None
        count = sum(spec.lora for spec in self._specs.values())
        self._server.ask(
            "/v1/load_lora_adapter",
            {"lora_name": name, "lora_path": str(path)},
            f"it has to read '{path}' (engine.vllm.folder), and to be started with "
            f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora --max-loras {count} --max-lora-rank {rank}",
        )

    # -- what is checked before anything is played ----------------------------------------------------------

    def _check_model(self) -> str:
        """The name of the base; the longest request has to fit it."""
        found = self._server.ask("/v1/models")
        cards = found.get("data") if isinstance(found, dict) else None
        whole = [card for card in cards or () if isinstance(card, dict) and not card.get("parent")]
        if not whole or not isinstance(whole[0].get("id"), str):
            raise self._server.gone("serves no model", SERVE)
        longest = whole[0].get("max_model_len")
        if isinstance(longest, int) and longest < self.settings.context:
            raise self._server.gone(
                f"takes {longest} tokens and a call may have engine.max_prompt + max_new_tokens = "
                f"{self.settings.context}",
                f"start it with --max-model-len {self.settings.context}, or shorten them",
            )
        return str(whole[0]["id"])

    def _check_tokens(self, tokenizer: Any) -> None:
        text = {"model": self._base, "prompt": PROBE, "add_special_tokens": False}
        found = self._server.ask("/tokenize", text)
        mine = tokenizer.encode(PROBE, add_special_tokens=False)
        if not isinstance(found, dict) or found.get("tokens") != list(mine):
            raise self._server.gone(
                "has another tokenizer than policies.base", "serve the directory of policies.base"
            )

    def _check_logprobs(self, base: str, params: Tree, tokenizer: Any) -> None:
        """That log-probs are of the distribution sampled from, and of these weights."""
        prompt = tuple(tokenizer.encode(PROBE, add_special_tokens=False))
        prompt = prompt[: max(1, self.settings.context - PROBE_TOKENS)]
        drawn = Request(prompt, (0,), min(PROBE_TOKENS, self.settings.context - len(prompt)))
        certain = self._server.complete(dataclasses.replace(drawn, top_k=1), self._base)
        if min(certain.logprobs) < -1e-3:  # of the one token that top-k leaves
            raise self._server.gone(
                "gives log-probs of another distribution than it samples from",
                "start it with --logprobs-mode processed_logprobs",
            )
        answer = self._server.complete(drawn, self._base)
        tokens, vocabulary = np.array([*prompt, *answer.tokens]), self.config.vocab_size
        gap = math.inf
        if tokens.max() < vocabulary:
            logits = jax.jit(functools.partial(forward, config=self.config))(params, tokens=tokens[None])
            logp = np.asarray(jax.nn.log_softmax(logits[0]))[len(prompt) - 1 : -1]
            ours = logp[np.arange(len(answer.tokens)), answer.tokens]
            gap = float(np.abs(ours - answer.logprobs).mean())
        if not gap <= ALIKE:
            raise self._server.gone(
                f"answers with other weights than those of '{base}': its log-probs are {gap:.2f} nats a token off",
                f"serve '{base}'",
            )


@dataclasses.dataclass(frozen=True)
class _Folder:
    """Where adapters lie; it goes with the run."""

    held: "tempfile.TemporaryDirectory[str]"

    @property
    def path(self) -> Path:
        return Path(self.held.name).absolute()

    @property
    def name(self) -> str:
        """Unlike that of any other run on this server."""
        return self.path.name


def _folder(within: str | None) -> _Folder:
    try:
        held = tempfile.TemporaryDirectory(prefix="marl_jax_", dir=within, ignore_cleanup_errors=True)
        Path(held.name).chmod(0o755)  # the server may be another user
    except OSError as error:
        raise EngineGone(
            f"engine.vllm.folder is {within!r}, which cannot be written to ({error}): create it, or name another"
        ) from None
    return _Folder(held)


def _only_base(specs: Mapping[str, PolicySpec]) -> str:
    bases = list(dict.fromkeys(spec.base for spec in specs.values()))
    if len(bases) > 1 or any(not spec.lora and not spec.frozen for spec in specs.values()):
        raise EngineGone(
            f"a vLLM server has the weights of one base, with adapters, and the policies {', '.join(specs)} have "
            "others: take engine.kind=embedded"
        )
    return bases[0]
