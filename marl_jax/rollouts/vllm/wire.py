"""The wire to a vLLM server: JSON over HTTP, requests as token ids, complete answers.

Request ──► POST /v1/completions ──► Completion, or one line: EngineGone
"""

import functools
import http.client
import json
import math
import os
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from marl_jax.rollouts.voices import EngineGone
from marl_jax.sampling.requests import Completion, Request, noise_key

BUSY, BUSY_S = (429, 503), 60.0  # a server, or a proxy before it, that says so is asked again for a while
NEVER = -9999.0  # in the place of minus infinity: no such token can be sampled
ROUNDING = 1e-3  # far more than that of float32, in which vLLM computes log-probs of any model


class Server:
    """The wire: JSON over one connection per thread, which is opened again if the server closed it."""

    def __init__(self, url: str, timeout: float, way_out: str = "see its log", vocabulary: float = math.inf):
        """`way_out` is the advice at the end of most errors; `vocabulary` is the number of token ids.

        The address may end in /v1, as clients of OpenAI's API have it.
        """
        parts = urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        port = parts.port or kind.default_port
        longest = min(timeout, threading.TIMEOUT_MAX)
        self._open = functools.partial(kind, parts.hostname or "", port, timeout=longest)
        self.url, self._timeout, self.way_out = url, timeout, way_out
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._vocabulary, self._own = vocabulary, threading.local()

    def gone(self, what: str, way_out: str = "") -> EngineGone:
        """The error, in one line."""
        what = " ".join(what.split())
        return EngineGone(f"the vLLM server at {self.url} {what}: {way_out or self.way_out}")

    def hangs(self) -> EngineGone:
        """The error for an answer that does not come."""
        return self.gone(
            f"has not answered within {self._timeout:g} s",
            "see its log, and start it again, or raise engine.vllm.timeout",
        )

    def ask(self, path: str, body: Any = None, way_out: str = "", ok: tuple[int, str] | None = None) -> Any:
        """The server's answer: JSON, or its text where it is not JSON.

        `ok` is the status and a part of the text of a refusal which shows that the request was carried out before.
        """
        pause, end = 0.5, time.monotonic() + min(BUSY_S, self._timeout)
        try:
            while (answered := self._exchange(path, body))[0] in BUSY and time.monotonic() + pause < end:
                time.sleep(pause)
                pause = min(2 * pause, 8.0)
        except TimeoutError:
            raise self.hangs() from None
        except (OSError, http.client.HTTPException, UnicodeError) as error:  # Unicode: a host such as a..b
            raise self.gone(f"cannot be reached ({type(error).__name__}: {error})") from None
        status, text = answered
        try:
            answer: Any = json.loads(text)
        except (ValueError, RecursionError):  # no JSON, or nested too deeply
            answer = text
        if status != 200 and not (ok and status == ok[0] and ok[1] in text):
            reason = answer.get("error", answer) if isinstance(answer, dict) else answer
            reason = reason.get("message", reason) if isinstance(reason, dict) else reason
            line = " ".join(str(reason).split())[:200]
            raise self.gone(f"refused {path} ({status}: {line})", way_out)
        return answer

    def complete(self, request: Request, name: str, salt: str | None = None) -> Completion:
        """The answer of the model `name` to a request; only prompts cached with the same salt are reused."""
        first, second = noise_key(request.key).tolist()
        body = {
            "model": name,
            "prompt": list(request.tokens),
            "max_tokens": request.max_new_tokens,
            "min_tokens": request.min_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k or -1,
            "seed": first << 31 | second >> 1,  # 63 bits
            "stop_token_ids": list(request.stop_tokens),
            "ignore_eos": True,  # only stop_token_ids end it
            "logprobs": 1,
            "return_token_ids": True,
            # Where the model's directory has sampling defaults, they must not apply.
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            **({"cache_salt": salt} if salt else {}),
        }
        way_out = f"if it was restarted, the same command loads '{name}' again; else see its log"
        return self._read(self.ask("/v1/completions", body, way_out), request, name)

    def _read(self, answer: Any, request: Request, name: str) -> Completion:
        """The completion in an answer; raises if anything is missing or wrong."""
        if not isinstance(answer, dict) or answer.get("model") != name:
            served = answer.get("model") if isinstance(answer, dict) else answer
            raise self.gone(f"answered as {served!r:.80} to a request for '{name}'")
        choices = answer.get("choices")
        choice: Any = choices[0] if isinstance(choices, list) and choices else None
        choice = choice if isinstance(choice, dict) else {}
        tokens, reason = choice.get("token_ids"), choice.get("finish_reason")
        if not _all(tokens, int):
            raise self.gone("answered without token ids", "start a vLLM that supports return_token_ids")
        if wrong := [token for token in tokens if not 0 <= token < self._vocabulary]:
            raise self.gone(f"answered with token {wrong[0]!r:.40}, which policies.base does not have")
        if choice.get("prompt_token_ids") not in (None, list(request.tokens)):
            raise self.gone("read other tokens than were sent")
        # A server may say "length" of a stop token in the last place.
        ended = reason in ("stop", "length") and tokens[-1:] and tokens[-1] in request.stop_tokens
        if early := [place for place, token in enumerate(tokens[:-1], 1) if token in request.stop_tokens]:
            raise self.gone(f"continued after the stop token, token {early[0]} of {len(tokens)}")
        if len(tokens) > request.max_new_tokens or (ended and len(tokens) < request.min_new_tokens):
            raise self.gone(
                f"answered with {len(tokens)} tokens; {request.min_new_tokens} to {request.max_new_tokens} and a "
                "stop token were requested"
            )
        if not tokens or not (ended or (reason == "length" and len(tokens) == request.max_new_tokens)):
            raise self.gone(
                f"ended an answer after {len(tokens)} of {request.max_new_tokens} tokens, with finish_reason "
                f"{reason!r:.40} and no stop token"
            )
        scored: Any = choice.get("logprobs")
        logprobs: Any = scored.get("token_logprobs") if isinstance(scored, dict) else None
        if not (_all(logprobs, int | float) and len(logprobs) == len(tokens)):
            raise self.gone("answered without a log-prob for every token")
        if wrong := [logp for logp in logprobs if not NEVER < logp <= ROUNDING]:
            raise self.gone(f"answered with {wrong[0]!r:.40} as the log-prob of a token")
        return Completion(tokens, [float(logp) for logp in logprobs], "stop" if ended else "length")

    def _exchange(self, path: str, body: Any) -> tuple[int, str]:
        payload = None if body is None else json.dumps(body)
        connection = getattr(self._own, "connection", None)
        if connection is not None:  # the server may have closed it; requests have seeds and may be sent twice
            try:
                return self._send(connection, path, payload)
            except TimeoutError:
                raise
            except (OSError, http.client.HTTPException):
                pass
        self._own.connection = self._open()
        return self._send(self._own.connection, path, payload)

    def _send(
        self, connection: http.client.HTTPConnection, path: str, payload: str | None
    ) -> tuple[int, str]:
        headers = {"Content-Type": "application/json"} if payload is not None else {}
        if key := os.environ.get("VLLM_API_KEY", "").strip():  # the server's --api-key
            headers["Authorization"] = f"Bearer {key}"
        try:
            connection.request("GET" if payload is None else "POST", self._path + path, payload, headers)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        except BaseException:
            connection.close()
            self._own.connection = None
            raise


def _all(values: Any, kind: Any) -> bool:
    return isinstance(values, list) and all(isinstance(v, kind) and not isinstance(v, bool) for v in values)
