"""Log-probs and entropy at target tokens; logits exist only for one chunk of tokens at a time.

    z = hidden @ head / temperature,    logp = z[target] - logsumexp(z),    H = -sum exp(log p) log p

The backward pass computes the logits of each chunk again, so memory is chunk x vocabulary for any batch. The gradient
of the head is summed in float32, whatever the dtype of the products.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

from marl_jax.models.scatter import UNIQUE, distinct


def token_logprobs(
    hidden: jax.Array,  # [B, T, H]
    head: jax.Array,  # [H, V]
    targets: jax.Array,  # [B, T]
    *,
    temperature: float | jax.Array = 1.0,  # [] or [B] or [B, T]
    kept: jax.Array | None = None,  # [B, T, K] token ids that were not cut by top-k or top-p, padded with -1
    chunk: int = 4096,  # tokens whose logits exist at the same time; at least one of each sequence
) -> tuple[jax.Array, jax.Array]:
    """(logp, entropy), both float32 [B, T], of the tempered distribution renormalised over the kept set.

    The head may be float32 while `hidden` is bfloat16: it is multiplied in the dtype of `hidden`, and its
    gradient comes back in float32. A target outside its kept set has log-prob -inf. No gradient flows to the
    temperature.
    """
    chex.assert_rank([hidden, head, targets], [3, 2, 2])
    chex.assert_equal_shape_prefix([hidden, targets], 2)
    if not targets.size:
        empty = jnp.zeros(targets.shape, jnp.float32)
        return empty, empty
    batch, length = targets.shape
    temperature = jnp.asarray(temperature, jnp.float32)
    temperature = temperature[:, None] if temperature.ndim == 1 else temperature
    temperature = jnp.broadcast_to(temperature, targets.shape)
    width = width_of(batch, length, chunk)
    # Chunks are cut along T, so that a batch sharded over devices is not moved.
    split = lambda x: _chunks(x, width)
    kept = None if kept is None else split(kept)
    logp, entropy = _chunked(split(hidden), head, split(targets), split(temperature), kept)
    join = lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, -1)[:, :length]
    return join(logp), join(entropy)


def width_of(batch: int, length: int, chunk: int) -> int:
    """Tokens of each sequence in a chunk: chunks are equal, so that the last one is not mostly padding."""
    chunks = max(1, -(-length // max(1, chunk // batch)))
    return -(-length // chunks)


@jax.custom_vjp
def _chunked(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, temperature: jax.Array, kept: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    return _forward(hidden, head, targets, temperature, kept)[0]


def _forward(hidden, head, targets, temperature, kept):  # type: ignore[no-untyped-def]
    weights = head.astype(hidden.dtype)

    def step(_, chunk):  # type: ignore[no-untyped-def]
        h, target, temp, ids = chunk
        logits = _logits(h, weights, ids)
        # The largest logit is subtracted first: otherwise sums would round away the difference between a nearly
        # certain token and a certain one, and a small temperature would amplify the rounding error of the division.
        top = jnp.max(logits, axis=-1, keepdims=True)
        z = (logits - top) / temp[..., None]
        e = jnp.exp(z)
        total = jnp.sum(e, axis=-1, keepdims=True)
        rest = jnp.log(total)
        logp = jnp.take_along_axis(z, target[..., None], axis=-1) - rest
        # H = -sum p (z - rest): both sums in one pass over the logits
        entropy = rest - jnp.sum(jnp.where(e > 0, e * z, 0.0), axis=-1, keepdims=True) / total
        return None, (logp[..., 0], entropy[..., 0], (top, rest))

    _, (logp, entropy, log_z) = jax.lax.scan(step, None, (hidden, targets, temperature, kept))
    return (logp, entropy), (hidden, head, targets, temperature, kept, entropy, log_z)


def _backward(saved, cotangents):  # type: ignore[no-untyped-def]
    hidden, head, targets, temperature, kept, entropy, log_z = saved
    weights = head.astype(hidden.dtype)

    def step(head_grad, chunk):  # type: ignore[no-untyped-def]
        h, target, temp, ids, ent, (top, rest), d_logp, d_entropy = chunk
        log_p = (_logits(h, weights, ids) - top) / temp[..., None] - rest
        p = jnp.exp(log_p)
        # d logp / d z = onehot - p;    d H / d z = -p (log p + H)
        surprise = jnp.where(p > 0, log_p, 0.0) + ent[..., None]
        hit = jax.nn.one_hot(target, head.shape[1], dtype=p.dtype)
        d_z = d_logp[..., None] * (hit - p) - d_entropy[..., None] * p * surprise
        d_z = (d_z / temp[..., None]).astype(h.dtype)
        dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32, precision="highest")
        # One summed axis: with two, XLA on CPU has no such product of bfloat16 into a transposed float32.
        flat = lambda x: x.reshape(-1, x.shape[-1])
        head_grad = head_grad + dot("th,tv->hv", flat(h), flat(d_z))
        return head_grad, dot("btv,hv->bth", d_z, weights).astype(h.dtype)

    chunks = (hidden, targets, temperature, kept, entropy, log_z, *cotangents)
    head_grad, hidden_grad = jax.lax.scan(step, jnp.zeros(head.shape, jnp.float32), chunks)
    no_gradient = lambda x: None if x is None else np.zeros(x.shape, jax.dtypes.float0)
    head_grad = head_grad.astype(head.dtype)
    return hidden_grad, head_grad, no_gradient(targets), jnp.zeros_like(temperature), no_gradient(kept)


_chunked.defvjp(_forward, _backward)


def _logits(h: jax.Array, weights: jax.Array, kept: jax.Array | None) -> jax.Array:
    """float32 [B, t, V]; -inf outside the kept set."""
    z = jnp.einsum("bth,hv->btv", h, weights, preferred_element_type=jnp.float32, precision="highest")
    if kept is None:
        return z
    rows = jnp.arange(kept.size // kept.shape[-1])[:, None]
    flat = kept.reshape(-1, kept.shape[-1])
    vocab = z.shape[-1]
    inside = jnp.zeros((flat.shape[0], vocab), bool)
    inside = inside.at[rows, distinct(jnp.where(flat < 0, vocab, flat), vocab)].set(True, **UNIQUE)
    # The kept set of padding is empty; all tokens are allowed there, to avoid an empty softmax.
    inside = inside | (flat < 0).all(axis=-1, keepdims=True)
    return jnp.where(inside.reshape(z.shape), z, -jnp.inf)


def _chunks(x: jax.Array, width: int) -> jax.Array:
    """[B, T, ...] -> [T / width, B, width, ...], T padded with its last entry."""
    batch, length = x.shape[:2]
    short = -length % width
    x = jnp.pad(x, [(0, 0), (0, short)] + [(0, 0)] * (x.ndim - 2), mode="edge")
    return jnp.moveaxis(x.reshape(batch, -1, width, *x.shape[2:]), 1, 0)
