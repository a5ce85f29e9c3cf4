"""A request to the engine, and the completion that answers it.

A request contains everything that decides its tokens, including the key of its noise. The other requests in the batch,
the lane and the time of submission have no influence.
"""

import dataclasses
import hashlib
import math
import numbers
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal

import numpy as np

from marl_jax.fields import is_whole
from marl_jax.models import ModelConfig
from marl_jax.sampling.shapes import EngineSettings


@dataclasses.dataclass(frozen=True)
class Request:
    """Sample one completion of `tokens`. Its noise depends only on the integers of `key` (seed, step, task, ...)."""

    tokens: tuple[int, ...]  # the prompt
    key: tuple[int, ...]  # decides the noise, and with it the tokens
    max_new_tokens: int  # longest completion
    policy: str | None = None  # which of the engine's adapters answers; None is the base
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # 1 is off
    top_k: int = 0  # 0 is off
    min_new_tokens: int = 0  # the completion cannot stop before this many tokens
    stop_tokens: tuple[int, ...] = ()  # ids that end the completion
    stop_strings: tuple[str, ...] = ()  # texts that end the completion
    keep: bool = False  # keep its cache: a later prompt will begin with this prompt and completion

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", token_ids("prompt", self.tokens))
        object.__setattr__(self, "stop_tokens", token_ids("stop_tokens", self.stop_tokens))
        for part in self.key:
            check_whole("key", part)
        if isinstance(self.stop_strings, str) or not all(isinstance(s, str) and s for s in self.stop_strings):
            raise ValueError(f"stop_strings is {self.stop_strings!r}; it must be a list of non-empty strings")
        if not self.tokens:
            raise ValueError(
                "the prompt is empty: give at least one token (a start or end-of-text token will do)"
            )
        check_range("temperature", self.temperature, 0, math.inf)
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p is {self.top_p!r}; it must be above 0 and at most 1 (1 is off)")
        check_range("top_k", self.top_k, 0, math.inf, whole=True)
        check_range("max_new_tokens", self.max_new_tokens, 1, math.inf, whole=True)
        check_range("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens, whole=True)


@dataclasses.dataclass(frozen=True)
class Completion:
    """A sampled completion, or the part of one whose request gave up its lane."""

    tokens: list[int]  # sampled, including the stop token
    logprobs: list[float]  # one per token, of the distribution sampled from
    finish_reason: Literal["stop", "length"]  # "stop": by a stop token or text; "length": by max_new_tokens
    # [tokens,C] ids that top-k and top-p kept, each row padded with -1
    kept: np.ndarray | None = dataclasses.field(default=None, compare=False)


def check(
    request: Request,
    config: ModelConfig,
    settings: EngineSettings,
    policies: Collection[str | None],
    to_text: Any,
) -> None:
    """Refuse, in one line, a request that an engine of these settings cannot serve."""
    features, vocab = settings.features, config.vocab_size
    if request.policy not in policies:
        known = ", ".join(str(name) for name in policies if name is not None)
        build = f"name it when the engine is built: Engine(..., policies=[{request.policy!r}])"
        hint = f"there are {known}" if known else build
        raise ValueError(f"no policy {request.policy!r} is served here; {hint}")
    for what, tokens in (("prompt", request.tokens), ("stop_tokens", request.stop_tokens)):
        if tokens and not (min(tokens) >= 0 and max(tokens) < vocab):
            token = next(token for token in tokens if not 0 <= token < vocab)
            raise ValueError(f"{what} holds token {token}; the vocabulary is 0..{vocab - 1}")
    need = len(request.tokens) + request.max_new_tokens
    if need > settings.context:
        raise ValueError(
            f"a prompt of {len(request.tokens)} tokens and {request.max_new_tokens} new ones need {need} "
            f"positions; this engine has {settings.context}: shorten the prompt or max_new_tokens"
        )
    if len(request.stop_tokens) > settings.stops:
        raise ValueError(f"{len(request.stop_tokens)} stop tokens; this engine takes up to {settings.stops}")
    if request.stop_strings and to_text is None:
        raise ValueError("stop_strings need a tokenizer: they are looked for in the text")
    if (request.top_k or request.top_p < 1) and not features.truncate:
        raise ValueError("this engine was planned without truncation: plan it with Features(truncate=True)")
    if request.min_new_tokens and not features.min_new:
        raise ValueError(
            "this engine was planned without min_new_tokens: plan it with Features(min_new=True)"
        )
    if request.min_new_tokens and len(set(request.stop_tokens)) >= vocab:
        raise ValueError("stop_tokens hold the whole vocabulary, so min_new_tokens leaves nothing to sample")
    sampled = request.temperature > 0
    if features.candidates and sampled and not 0 < min(request.top_k, vocab) <= features.candidates:
        raise ValueError(
            f"top_k is {request.top_k}; an engine that records kept sets of up to {features.candidates} "
            f"tokens needs top_k of 1..{features.candidates}"
        )


def noise_key(key: Sequence[int]) -> np.ndarray:
    """Any tuple of integers -> the two 32-bit words that seed a request's noise."""
    return noise_keys([",".join(str(int(part)) for part in key)])[0]


def noise_keys(texts: Iterable[str]) -> np.ndarray:
    """The keys, uint32 [N, 2], of tuples that are given as texts: integers with commas between them."""
    words = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return np.frombuffer(words, np.uint32).reshape(-1, 2)


def token_ids(what: str, tokens: Any) -> tuple[int, ...]:
    """A sequence or array of integers as a tuple."""
    ids = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise TypeError(
            f"{what} is {ids!r:.80}; it must be a list of token ids (encode text with the tokenizer)"
        )
    ids = tuple(ids)
    if set(map(type, ids)) <= {int}:
        return ids
    ids = tuple(token.item() if getattr(token, "ndim", None) == 0 else token for token in ids)  # JAX scalars
    for token in ids:
        if not is_whole(token):
            raise TypeError(f"{what} holds {token!r:.80}; token ids are integers")
    return tuple(int(token) for token in ids)


def check_whole(name: str, value: Any) -> None:
    """Refuse a value that is not an integer."""
    if not is_whole(value):
        raise TypeError(f"{name} is {value!r:.80}; it must be an integer")


def check_range(name: str, value: Any, low: float, high: float, *, whole: bool = False) -> None:
    """Refuse a value that is not a number of low..high, in one line that names it."""
    fits = is_whole(value) if whole else _is_number(value)
    if not fits or not low <= value <= high or math.isinf(value):
        top = "" if math.isinf(high) else f" and at most {high}"
        raise ValueError(
            f"{name} is {value!r:.80}; it must be a {'whole ' if whole else ''}number of at least {low}{top}"
        )


def _is_number(value: Any) -> bool:
    if type(value) not in (int, float) and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        return False
    return not math.isnan(float(value))
