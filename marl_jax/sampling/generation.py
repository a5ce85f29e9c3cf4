"""The engine in one call: prompts in, completions out."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marl_jax.models import ModelConfig
from marl_jax.models.lora import num_adapters
from marl_jax.models.weight_table import check_params
from marl_jax.sampling.engine import Engine
from marl_jax.sampling.programs import Features
from marl_jax.sampling.requests import Completion, Request, check, check_whole, token_ids
from marl_jax.sampling.shapes import Load, plan, round_down, round_up

MAX_CANDIDATES = 512


def generate(
    params: Any,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    temperature: float | Sequence[float] = 1.0,
    top_p: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    seed: int | None = None,
    stop_tokens: Sequence[int] = (),
    request_ids: Sequence[int] | None = None,
    min_new_tokens: int = 0,
    stop_strings: str | Sequence[str] = (),
    tokenizer: Any = None,
    record_kept: bool = False,
    adapters: Any = None,
    adapter_index: Sequence[int] | None = None,
    adapter_scale: float = 1.0,
    lanes: int | None = None,
    budget_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Completion]:
    """Sample one completion per prompt (lists of token ids), in the order of the prompts.

    temperature 0 is greedy, top_p 1 and top_k 0 are off, stop_tokens () is none. max_new_tokens, temperature, top_p
    and top_k may be one value or one per prompt. The noise of a prompt is a function of (seed, its request id) alone;
    ids default to the index. `record_kept` adds the ids that top-k and top-p keep (top_k 1..512).
    `progress(finished, all)` is called after every dispatch.
    """
    if isinstance(prompts, str) or not hasattr(prompts, "__len__"):
        raise TypeError(f"prompts is {prompts!r:.80}; it must be a list of lists of token ids")
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    count = len(prompts)
    keys = _keys(seed, temperature, range(count) if request_ids is None else request_ids, count)
    _check_dtype(params, config)
    check_params(config, params)
    columns: dict[str, Sequence[Any]] = {
        "key": keys,
        "policy": _adapter_names(adapters, adapter_index, count),
        "max_new_tokens": _per_prompt("max_new_tokens", max_new_tokens, count),
        "temperature": _per_prompt("temperature", temperature, count),
        "top_p": _per_prompt("top_p", top_p, count),
        "top_k": _per_prompt("top_k", top_k, count),
        "min_new_tokens": [min_new_tokens] * count,
        "stop_tokens": [token_ids("stop_tokens", stop_tokens)] * count,
        "stop_strings": [(stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)] * count,
    }
    rows = (dict(zip(columns, values)) for values in zip(*columns.values()))
    requests = [Request(tokens, **row) for tokens, row in zip(prompts, rows)]
    if not requests:
        return []
    settings = plan(config, _load(requests, config, record_kept), lanes=lanes, budget_bytes=budget_bytes)
    to_text = None if tokenizer is None else tokenizer.decode
    policies = [] if adapters is None else [str(i) for i in range(num_adapters(adapters))]
    for request in requests:  # before anything is compiled
        check(request, config, settings, (None, *policies), to_text)
    engine = Engine(
        params,
        config,
        settings,
        adapters=adapters,
        adapter_scale=adapter_scale,
        policies=policies,
        to_text=to_text,
    )
    tickets = [engine.submit(request) for request in requests]
    completions: dict[int, Completion] = {}
    while engine.pending:
        completions.update(engine.step())
        if progress is not None:
            progress(len(completions), count)
    return [completions[ticket] for ticket in tickets]


def _keys(seed: int | None, temperature: Any, request_ids: Any, count: int) -> list[tuple[int, int]]:
    """The key of each prompt's noise; a seed is needed if any prompt is sampled."""
    if seed is None:
        if any(t != 0 for t in np.ravel(np.asarray(temperature, dtype=object))):
            raise ValueError("sampling needs a seed: pass seed=..., or temperature=0 for greedy decoding")
        seed = 0
    ids = _per_prompt("request_ids", request_ids, count)
    check_whole("seed", seed)
    for request_id in ids:
        check_whole("a request id", request_id)
    return [(seed, request_id) for request_id in ids]


def _check_dtype(params: Any, config: ModelConfig) -> None:
    if other := {str(x.dtype) for x in jax.tree.leaves(params)} - {str(jnp.dtype(config.dtype))}:
        raise ValueError(
            f"the weights are {', '.join(sorted(other))}, and config.dtype is {config.dtype}: cast them, or give "
            "dataclasses.replace(config, dtype=...)"
        )


def _load(requests: Sequence[Request], config: ModelConfig, record_kept: bool) -> Load:
    """The load of these requests, with lengths rounded so that similar prompts reuse the programs of the last call."""
    lengths = [len(request.tokens) for request in requests]
    longest, new = max(lengths), max(request.max_new_tokens for request in requests)
    if longest + new > config.max_position_embeddings:  # the longest completion may belong to a short prompt
        new = max(len(r.tokens) + r.max_new_tokens for r in requests) - longest
    roomy = min(round_up(longest), config.max_position_embeddings - new)
    features = Features(
        truncate=any(r.top_k or r.top_p < 1 for r in requests),
        min_new=any(r.min_new_tokens for r in requests),
        candidates=min(_candidates(requests), config.vocab_size) if record_kept else 0,
    )
    return Load(
        max_prompt=max(longest, roomy),
        min_prompt=round_down(min(lengths)),
        max_new=new,
        requests=len(requests),
        features=features,
        stops=max(8, *(len(request.stop_tokens) for request in requests)),
    )


def _per_prompt(name: str, value: Any, count: int) -> Sequence[Any]:
    """A value for each prompt; one value for all is repeated."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, str) or not hasattr(value, "__len__"):
        return [value] * count
    if len(value) != count:
        raise ValueError(
            f"{name} has {len(value)} values for {count} prompts; give one value, or one per prompt"
        )
    return value


def _adapter_names(adapters: Any, index: Sequence[int] | None, count: int) -> list[str | None]:
    if adapters is None:
        if index is not None:
            raise ValueError("adapter_index is given without adapters")
        return [None] * count
    if index is None:
        raise ValueError("adapters need adapter_index: which adapter answers each prompt? (-1 is the base)")
    indices = _per_prompt("adapter_index", index, count)
    for i in indices:
        if i not in range(-1, num_adapters(adapters)):
            raise ValueError(
                f"adapter_index holds {i!r:.80}; there are {num_adapters(adapters)} adapters, -1 is the base"
            )
    return [None if i < 0 else str(int(i)) for i in indices]


def _candidates(requests: Sequence[Request]) -> int:
    sampled = [request for request in requests if request.temperature > 0]
    for request in sampled:
        if not 1 <= request.top_k <= MAX_CANDIDATES:
            raise ValueError(
                f"top_k is {request.top_k}; a recorded kept set needs top_k of 1..{MAX_CANDIDATES}"
            )
    return max((request.top_k for request in sampled), default=1)
