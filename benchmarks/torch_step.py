"""A plain GRPO step in torch: padded rows, scaled_dot_product_attention, gradients added up, clipped, AdamW.

`benchmarks.update` is compared with it; `tests/learning/test_update_parity.py` checks that its gradient equals ours.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from marl_jax.models import ModelConfig
from marl_jax.table import Table

Step = Callable[[], None]


def torch_step(
    model: ModelConfig, params: Any, rows: Table, micro_rows: int = 64, max_norm: float = 1.0
) -> tuple[Step, Any]:
    """A step over rows of one length, and the weights that it trains, in the tree of `params`."""
    import torch
    import torch.nn.functional as F

    c = model
    weights = jax.tree.map(lambda x: torch.tensor(np.asarray(x), requires_grad=True), params)
    leaves = jax.tree.leaves(weights)
    optimiser = torch.optim.AdamW(leaves, lr=1e-4, weight_decay=0.01)
    every = range(len(rows))
    tokens = torch.tensor(np.stack([np.concatenate([rows.prompt[i], rows.tokens[i]]) for i in every])).long()
    start = len(rows.prompt[0]) - 1
    advantages = torch.tensor(rows.advantage, dtype=torch.float32)[:, None]
    sampler = torch.tensor(np.stack([rows.logprobs[i] for i in every]))
    frequency = c.rope_theta ** (-torch.arange(0, c.head_dim, 2) / c.head_dim)
    angle = torch.arange(tokens.shape[1] - 1)[:, None] * frequency
    cos, sin = angle.cos()[None, :, None], angle.sin()[None, :, None]

    def norm(x, w):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps) * w

    def rope(x):
        low, high = x.chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    def log_probs(tokens):
        inputs, targets = tokens[:, :-1], tokens[:, start + 1 :]
        x = weights["embed"][inputs]
        for i in range(c.num_hidden_layers):
            w = {name: stacked[i] for name, stacked in weights["layers"].items()}
            h = norm(x, w["attn_norm"])
            q, k, v = (torch.einsum("bth,hnd->btnd", h, w[name]) for name in "qkv")
            q, k = rope(norm(q, w["q_norm"])), rope(norm(k, w["k_norm"]))
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + torch.einsum("bntd,ndh->bth", attended, w["o"])
            h = norm(x, w["mlp_norm"])
            x = x + (F.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]
        x = norm(x[:, start:], weights["final_norm"])
        log_p = F.log_softmax(x @ weights["embed"].T, -1)
        return log_p.gather(-1, targets[..., None])[..., 0]

    def step() -> None:
        optimiser.zero_grad()
        for i in range(0, len(rows), micro_rows):
            part = slice(i, i + micro_rows)
            logp = log_probs(tokens[part])
            old, a = logp.detach(), advantages[part]
            ratio = (logp - old).clamp(-20, 20).exp()
            loss = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.28))
            loss = loss * (old - sampler[part]).clamp(-20, 20).exp().clamp(max=2.0)
            (loss.mean(1).sum() / len(rows)).backward()
        torch.nn.utils.clip_grad_norm_(leaves, max_norm)
        optimiser.step()

    return step, weights
