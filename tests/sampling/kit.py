"""What the sampling tests share: one micro model, one shape of engine, and references in float64 numpy."""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from marl_jax.models import ModelConfig, init
from marl_jax.models.lora import init_lora
from marl_jax.sampling import Completion, Engine, EngineSettings, Features, Request, methods, programs
from marl_jax.sampling.admission import NOWHERE, Feed
from marl_jax.sampling.requests import noise_key

CONFIG = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
)
# Prompts of 1..40 tokens and up to 24 new ones: several chunks, two cache lengths, fewer prefixes than lanes.
SETTINGS = EngineSettings(
    widths=(8,),
    lengths=(32, 64),
    chunks=(8, 16),
    prefill_tokens=32,
    prefixes=4,
    steps=4,
    stops=4,
    features=Features(truncate=True, min_new=True),
)
NEAR_TIE = 1e-5


def sharpen(params):
    """Random parameters whose next-token distributions are neither flat nor certain."""
    return params | {"final_norm": params["final_norm"] * (12.0 if "lm_head" not in params else 1.5)}


def make_params(config: ModelConfig = CONFIG):
    return sharpen(init(0, config))


SCALE = 2.0  # of the adapters


def make_adapters(config: ModelConfig = CONFIG):
    """Three adapters, each far enough from zero and from the others to be told apart."""
    noise, fresh = np.random.default_rng(2), init_lora(1, config, 4, 3)
    return jax.tree.map(lambda leaf: jnp.asarray(0.15 * noise.normal(size=leaf.shape), leaf.dtype), fresh)


def with_adapters(adapters) -> dict:
    """Options of an engine that serves them as policies a, b and c."""
    return {"adapters": adapters, "adapter_scale": SCALE, "policies": ("a", "b", "c")}


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng([length, seed]).integers(0, CONFIG.vocab_size, length).tolist())


def ask(tokens: Sequence[int], noise: int = 0, new: int = 12, **options) -> Request:
    return Request(tokens=tuple(tokens), key=(17, noise), max_new_tokens=new, **options)


def serve(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """All at once, in order."""
    tickets = [engine.submit(request) for request in requests]
    done: dict[int, Completion] = {}
    while engine.pending:
        done.update(engine.step())
    return [done[ticket] for ticket in tickets]


def same_bits(a: Completion, b: Completion) -> bool:
    return (a.tokens, a.logprobs, a.finish_reason) == (b.tokens, b.logprobs, b.finish_reason)


# -- counting compilations --------------------------------------------------------------------------------------

_compilations = [0]


def _hear(event: str, *_: object, **__: object) -> None:
    _compilations[0] += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_hear)


@contextlib.contextmanager
def compilations() -> Iterator[list[int]]:
    """A list that holds, after the block, how many programs XLA compiled in it."""
    before, counted = _compilations[0], []
    yield counted
    counted.append(_compilations[0] - before)


def warm_up(engine: Engine) -> None:
    """Compile every program that a fresh engine can need."""
    settings, nowhere, bank = engine.settings, next(engine._parts([(0, NOWHERE)])), engine._banks[0]
    for chunk, start in itertools.product(settings.chunks, {0, settings.context - 1}):
        engine._prefill([Feed(NOWHERE, (0,), start, -1)], chunk)
    engine._prefix_cache = programs.copy_rows_within(engine._prefix_cache, *nowhere)
    for rungs in [settings.rungs] if settings.lanes_at else [[shape] for shape in settings.shapes]:
        bank.open(*rungs)
        for rung in range(len(rungs)):
            first = sum(lanes for lanes, _ in rungs[:rung])
            bank.rungs[rung] = programs.copy_rows(engine._prefix_cache, bank.rungs[rung], *nowhere)
            engine._prefix_cache = programs.copy_rows(bank.rungs[rung], engine._prefix_cache, *nowhere)
            bank.table.lanes.active[first] = True  # so that rungs up to this one decode
            bank.begin(engine._decode)
            bank.wait()
            if rung:
                bank.swap([(first - 1, first)])
    for width, length in (
        [] if settings.lanes_at else settings.shapes
    ):  # what thins out, widens and grows a cache
        for other in {to for one, to in itertools.permutations(settings.widths, 2) if one == width}:
            bank.open((width, length))
            bank.fit(other)
        bank.open((width, length))
        bank.reach(length + 1)
    bank.open(*settings.rungs)


# -- float64 references -----------------------------------------------------------------------------------------


def logits64(params, tokens: Sequence[int], config: ModelConfig = CONFIG) -> np.ndarray:
    """Qwen3 written once more, in float64 numpy: logits [T,V]."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    heads, kv, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    length = len(tokens)
    angle = np.arange(length)[:, None, None] * config.rope_theta ** -(np.arange(0, dim, 2) / dim)
    rotation = np.exp(1j * angle)

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * weight

    def rope(x):
        turned = (x[..., : dim // 2] + 1j * x[..., dim // 2 :]) * rotation
        return np.concatenate([turned.real, turned.imag], -1)

    x = p["embed"][list(tokens)]
    for i in range(config.num_hidden_layers):
        w = {name: leaf[i] for name, leaf in p["layers"].items()}
        h = norm(x, w["attn_norm"])
        q, k = (np.tensordot(h, w[name], 1) for name in "qk")
        q, k, v = rope(norm(q, w["q_norm"])), rope(norm(k, w["k_norm"])), np.tensordot(h, w["v"], 1)
        k, v = (np.repeat(a, heads // kv, axis=1) for a in (k, v))
        scores = np.einsum("tnd,snd->nts", q, k) / math.sqrt(dim)
        scores[:, ~np.tri(length, dtype=bool)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.tensordot(np.einsum("nts,snd->tnd", weights, v), w["o"], 2)
        h = norm(x, w["mlp_norm"])
        gate = h @ w["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]
    x = norm(x, p["final_norm"])
    return x @ (p["lm_head"] if "lm_head" in p else p["embed"].T)


def kept64(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Which entries of one row survive top-k, then top-p: by sorting; of equal ones the lowest ids."""
    logits = np.asarray(logits, np.float64)
    kept = np.isfinite(logits)
    falling = np.sort(logits)[::-1]
    if top_k:
        kept &= np.argsort(np.argsort(-logits, kind="stable"), kind="stable") < top_k
    if top_p < 1:
        probs = softmax64(np.where(kept, logits, -np.inf))
        cumulative = np.concatenate([[0], np.cumsum(np.sort(probs)[::-1])])
        likelier = np.searchsorted(-falling, -logits, side="left")  # how many are
        kept &= cumulative[likelier] < top_p
    return kept


def softmax64(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return weights / weights.sum()


def sampled_from(logits: np.ndarray, request: Request, generated: int) -> np.ndarray:
    """The distribution [V] that the request's token number `generated` is drawn from, given its logits."""
    logits = np.array(logits, np.float64)
    if generated < request.min_new_tokens:
        logits[list(request.stop_tokens)] = -np.inf
    if request.temperature == 0:
        return softmax64(logits)
    logits /= request.temperature
    return softmax64(np.where(kept64(logits, request.top_k, request.top_p), logits, -np.inf))


def margin(params, request: Request, sampled: Sequence[int], config: ModelConfig = CONFIG) -> float:
    """How near the token after `sampled` is to being another one: 0 is a tie.

    Greedy: the gap between the two largest logits. Otherwise the distance of either uniform of the two-level
    inverse CDF to the nearest boundary of its level, or of top-k and top-p to what they just cut or kept.
    """
    logits = logits64(params, [*request.tokens, *sampled], config)[-1]
    if len(sampled) < request.min_new_tokens:
        logits[list(request.stop_tokens)] = -np.inf
    falling = np.sort(logits)[::-1]
    if request.temperature == 0:
        return falling[0] - falling[1]
    margins = []
    if request.top_k:
        margins.append(falling[request.top_k - 1] - falling[request.top_k])
    if request.top_p < 1:
        limited = kept64(logits, request.top_k, 1.0)
        probs = np.sort(softmax64(np.where(limited, logits / request.temperature, -np.inf)))[::-1]
        margins.append(np.abs(np.cumsum(probs) - request.top_p).min())
    size = math.isqrt(config.vocab_size - 1) + 1
    probs = sampled_from(logits, request, len(sampled))
    table = np.pad(probs, (0, -len(probs) % size)).reshape(-1, size)
    first, second = uniforms(request, len(sampled))
    cdf = np.cumsum(table.sum(1))
    row = table[min(np.searchsorted(cdf, first, side="right"), len(table) - 1)]
    margins += [np.abs(cdf - first).min(), np.abs(np.cumsum(row) / row.sum() - second).min()]
    return float(min(margins))


def uniforms(request: Request, generated: int) -> np.ndarray:
    """What the noise of the request is at its token number `generated`."""
    return np.asarray(methods.noise(jnp.array(noise_key(request.key))[None], jnp.array([generated])))[0]


def assert_same_but_for_near_ties(
    params, requests, ours, theirs, config: ModelConfig = CONFIG
) -> list[float]:
    """Tokens are equal, or first differ where a rounding error decides; returns the margins of those places."""
    margins = []
    for request, a, b in zip(requests, ours, theirs, strict=True):
        n = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens)) if x != y), None)
        if n is None:
            assert len(a.tokens) == len(b.tokens)
        else:
            margins.append(margin(params, request, a.tokens[:n], config))
            print(f"near-tie: request {request.key}, token {n}, margin {margins[-1]:.2e}")
            assert margins[-1] < NEAR_TIE
        np.testing.assert_allclose(a.logprobs[:n], b.logprobs[:n], atol=2e-5, rtol=0)
    return margins
