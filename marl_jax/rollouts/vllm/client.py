"""Rollouts on a vLLM server: token ids and log-probs go over HTTP, adapters or all weights of one policy over files.

    submit ──► threads ──► POST /v1/completions ──► tokens and log-probs, checked ──► step
    serve  ──► `weights` ──► the name by which the next requests ask for them

A caller gets a complete answer, or one `EngineGone` that says what to do. A server that the run started is first
started again, and unanswered requests are sent again.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging

from marl_jax.models import ModelConfig, forward
from marl_jax.policies import PolicySpec, Tree
from marl_jax.rollouts.vllm.started import ServerRequirements, Started
from marl_jax.rollouts.vllm.vllm_config import VllmConfig
from marl_jax.rollouts.vllm.weights import STARTED, Weights
from marl_jax.rollouts.vllm.wire import ROUNDING, Server
from marl_jax.rollouts.voices import EngineGone
from marl_jax.sampling.requests import Completion, Request, check
from marl_jax.sampling.shapes import EngineSettings
from marl_jax.threads import Workers

RESTARTS = 3  # restarts of a server that the run started, between two updates
LOOK_S = 0.5  # a step without any answer ends after this, so that a run can be stopped
PROBE, PROBE_TOKENS = "What is 12 + 7? Say it: 19.", 16
ALIKE = 0.5  # nats a token: two precisions of one model differ by hundredths, two models by more than this


class Vllm:
    """The engine of policies that decode together (see `policies.decode_groups`); drive it from one thread."""

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
        lora_scale: float = 1.0,
        log: Path | None = None,
    ):
        """`settings` has the longest request, and as its lanes the number of requests in flight, all of
        which a server that is started here decodes at the same time.

        `log` is the log file of a server that is started here; None: a file next to the weights' folder, which stays.
        """
        self.settings, self.config, self._policies = settings, config, tuple(specs)
        self.seconds: Mapping[str, float] = {}  # a server does not report its times of prefill and decode
        self._server_config, self._weights = server, Weights(specs, config, lora_scale, server.folder)
        base, full, lora = next(iter(specs.values())).base, self._weights.full, self._weights.lora
        rank = trees[lora[0]]["q"]["a"].shape[-1] if lora else 0
        needs = (len(lora), rank, full is not None, settings.lanes)
        self._needed = ServerRequirements(base, str(config.dtype), settings.context, *needs)
        log = log or self._weights.folder.with_suffix(".log")
        self._started = Started(server, self._needed, log) if server.start else None
        self._restarts = 0
        self._bases, self._tokenizer = bases, tokenizer
        try:
            self._connect()
            self._weights.write(trees)
            self._admit(trees)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End a server that was started here, and wait until it has ended."""
        self._workers.close()
        if self._started is not None:
            self._started.end()

    @property
    def pending(self) -> int:
        """How many requests are not finished."""
        return len(self._jobs)

    def check(self, request: Request) -> None:
        """Refuse, in one line, a request that the server cannot serve."""
        check(request, self.config, self.settings, self._policies, None)

    def submit(self, request: Request) -> int:
        """Send a request, at once if not too many are in flight; its completion comes out of a later `step`."""
        self.check(request)
        ticket = next(self._tickets)
        adapter = None if self._weights.full else self._weights.names.get(request.policy or "")
        self._sent[ticket] = request, adapter or self._base, self._weights.salt
        self._send(ticket)
        return ticket

    def step(self) -> list[tuple[int, Completion]]:
        """Wait a while for answers; returns those that arrived, in the order of their requests."""
        if not self._jobs:
            return []
        wait(self._jobs.values(), LOOK_S, FIRST_COMPLETED)
        self._workers.give_up()
        tickets = [ticket for ticket, job in self._jobs.items() if job.done()]
        answers, errors = list[tuple[int, Completion]](), list[EngineGone]()
        for ticket in tickets:
            try:
                answers.append((ticket, self._jobs[ticket].result()))
            except TimeoutError:
                errors.append(self._server.hangs())
            except EngineGone as error:
                errors.append(error)
        try:
            if errors:
                raise errors[0]
            all_done = len(tickets) == len(self._jobs)
            salt = self._weights.known(self._server) if all_done else self._weights.salt
        except EngineGone as error:
            self._forget(answers)
            self._start_again(error)
            return answers
        self._check_salt(salt)
        self._forget(answers)
        return answers

    def abandon(self) -> None:
        """Drop all requests. vLLM ends those under way in its own time, and keeps its cached prompts."""
        self._workers.close()
        self._begin()

    def serve(self, trees: Mapping[str, Tree]) -> None:
        """Answer with these weights from the next request on; frozen policies are the server's base."""
        old_names = self._weights.write(trees)
        self._restarts = 0
        try:
            if self._weights.held(self._server, old_names):
                self._weights.load(self._server)
            else:  # restarted meanwhile: perhaps with other flags, or another model
                self._admit(trees)
            self._weights.unload(self._server, old_names)
        except EngineGone as error:
            self._start_again(error)
        self._weights.drop(old_names)

    # -- requests -------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._workers = Workers("vllm", self.settings.lanes)
        self._jobs: dict[int, Future[Completion]] = {}
        self._sent: dict[int, tuple[Request, str, str | None]] = {}
        self._tickets = itertools.count()

    def _forget(self, answers: Sequence[tuple[int, Completion]]) -> None:
        for ticket, _ in answers:
            del self._jobs[ticket], self._sent[ticket]

    def _send(self, ticket: int) -> None:
        call, limit = self._server.complete, self._server_config.timeout
        self._jobs[ticket] = self._workers.submit(call, *self._sent[ticket], limit_s=limit)

    # -- the server -----------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Connect to the server at the address, or to a new one if the run starts it."""
        self._begin()
        if self._started is not None:
            url, way_out = self._started.start(), f"see its log, '{self._started.log}'"
        else:
            url = self._server_config.url
            way_out = f"see its log, and start it as '{self._needed.shown(self._server_config, url)}'"
        self._server = Server(url, self._server_config.timeout, way_out, self.config.vocab_size)

    def _start_again(self, error: EngineGone) -> None:
        """Replace the server that the run started; load the same weights and send the unanswered requests again."""
        if self._started is None or self._restarts == RESTARTS:
            raise error
        self._restarts += 1
        logging.warning("%s; it is started again", error)
        sent, tickets = self._sent, self._tickets
        self._workers.close()
        self._connect()
        self._weights.load(self._server)
        self._sent, self._tickets = sent, tickets
        for ticket in sent:
            self._send(ticket)

    # -- checks before anything is played -------------------------------------------------------------------

    def _admit(self, trees: Mapping[str, Tree]) -> None:
        """Check a server, and load the weights last written."""
        self._base = self._check_model()
        self._check_tokens(self._tokenizer)
        known, full = self._weights.known(self._server), self._weights.full
        if not full and known is not None:
            raise self._server.gone(
                f"has the full weights of another run ({known!r:.80})",
                "start it again, or give this run its own server",
            )
        if known in (None, STARTED):
            base = self._needed.base
            self._check_logprobs(f"'{base}'", self._bases[base], None)
        self._weights.load(self._server)
        if full:  # the server may have another run's weights
            self._check_logprobs(f"policy '{full}'", self._weights.served(trees[full]), self._weights.salt)

    def _check_model(self) -> str:
        """The server's name of the base; raises if the longest request does not fit."""
        answer = self._server.ask("/v1/models")
        cards = answer.get("data") if isinstance(answer, dict) else None
        cards = cards if isinstance(cards, list) else ()
        bases = [card for card in cards if isinstance(card, dict) and not card.get("parent")]
        if not bases or not isinstance(bases[0].get("id"), str):
            raise self._server.gone("serves no model")
        longest = bases[0].get("max_model_len")
        if isinstance(longest, int) and longest < self.settings.context:
            raise self._server.gone(
                f"takes {longest} tokens and a call may have engine.max_prompt + max_new_tokens = "
                f"{self.settings.context}"
            )
        return str(bases[0]["id"])

    def _check_salt(self, salt: str | None) -> None:
        if salt != self._weights.salt:
            raise self._server.gone(
                f"has other weights than this run sent ({salt!r:.80}): it was restarted, or another run uses it",
                "give each run its own server; the same command loads the weights again and repeats the step",
            )

    def _check_tokens(self, tokenizer: Any) -> None:
        text = {"model": self._base, "prompt": PROBE, "add_special_tokens": False}
        answer = self._server.ask("/tokenize", text)
        expected = tokenizer.encode(PROBE, add_special_tokens=False)
        if not isinstance(answer, dict) or answer.get("tokens") != list(expected):
            raise self._server.gone("has another tokenizer than policies.base")

    def _check_logprobs(self, whose: str, params: Tree, salt: str | None) -> None:
        """Raise unless log-probs are those of the distribution sampled from, and of these weights."""
        prompt = tuple(self._tokenizer.encode(PROBE, add_special_tokens=False))
        prompt = prompt[: max(1, self.settings.context - PROBE_TOKENS)]
        probe = Request(prompt, (0,), min(PROBE_TOKENS, self.settings.context - len(prompt)))
        complete = lambda request: self._server.complete(request, self._base, salt)
        greedy = complete(dataclasses.replace(probe, top_k=1))
        if min(greedy.logprobs) < -ROUNDING:  # log-prob of the one token that top-k leaves
            raise self._server.gone("gives log-probs of another distribution than it samples from")
        completion = complete(probe)
        tokens = np.array([*prompt, *completion.tokens])
        logits = jax.jit(functools.partial(forward, config=self.config))(params, tokens=tokens[None])
        logp = np.asarray(jax.nn.log_softmax(logits[0]))[len(prompt) - 1 : -1]
        ours = logp[np.arange(len(completion.tokens)), completion.tokens]
        gap = float(np.abs(ours - completion.logprobs).mean())
        if not gap <= ALIKE:
            raise self._server.gone(
                f"answers with other weights than those of {whose}: its log-probs are {gap:.2f} nats a token off"
            )
