"""The configuration of a Qwen3 model, with the field names of a published `config.json`.

A `ModelConfig` is frozen and hashable, so that it can be a static argument of `jax.jit`. Reading a configuration with
unsupported features (RoPE scaling, sliding windows, biases, other architectures) raises an error that names them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from marl_jax import fields
from marl_jax.fields import Count, Positive

ARCHITECTURE = "Qwen3ForCausalLM"
DTYPES = ("float32", "bfloat16")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
_REQUIRED = (
    "vocab_size",
    *SIZES,
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "tie_word_embeddings",
)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A dense Qwen3. `dtype` is that of the parameters; norms, softmax and logits are always float32."""

    vocab_size: Count  # tokens that can be read and sampled
    hidden_size: Count  # width of the residual stream
    intermediate_size: Count  # width inside the MLP
    num_hidden_layers: Count  # depth
    num_attention_heads: Count  # query heads
    num_key_value_heads: Count  # key and value heads; several query heads share one
    head_dim: Count  # width of a head
    rope_theta: Positive = 1e6  # base of the rotary frequencies
    rms_norm_eps: Positive = 1e-6  # added under the root of every norm
    tie_word_embeddings: bool = True  # logits use the embedding table
    max_position_embeddings: Count = 40960  # longest context
    dtype: str = "float32"  # of the stored weights
    bos_token_id: int | None = None  # begins a text; None: there is no such token
    eos_token_id: int | tuple[int, ...] | None = None  # ends a text
    pad_token_id: int | None = None  # padding

    def __post_init__(self) -> None:
        fields.check(self)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; RoPE rotates pairs, so it must be even")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; this library computes in {' or '.join(DTYPES)}")
        for name in TOKENS:
            object.__setattr__(self, name, _token_ids(name, getattr(self, name), self.vocab_size))

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The tokens that end a sequence, always as a tuple."""
        ids = self.eos_token_id
        return () if ids is None else ids if isinstance(ids, tuple) else (ids,)

    @classmethod
    def preset(cls, name: str) -> "ModelConfig":
        """`0.6b`, `1.7b`, `4b` as published; micro scales `xs` (0.1M parameters), `s` (0.4M), `m` (1.6M)."""
        if name not in PRESETS:
            raise ValueError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
        return PRESETS[name]

    @classmethod
    def from_hf(cls, published: Mapping[str, Any], *, dtype: str | None = None) -> "ModelConfig":
        """Read the content of a `config.json`, in the older or newer spelling; `dtype` overrides the file's."""
        if published.get("model_type") != "qwen3":
            raise ValueError(
                f"model_type is {published.get('model_type')!r}; only 'qwen3' (dense) is supported"
            )
        architectures = published.get("architectures") or [ARCHITECTURE]
        if list(architectures) != [ARCHITECTURE]:
            raise ValueError(f"architectures is {architectures!r}; only ['{ARCHITECTURE}'] is supported")
        _refuse_unsupported(published)
        missing = [name for name in _REQUIRED if published.get(name) is None]
        if missing:
            raise ValueError(f"the model configuration lacks {', '.join(missing)}")
        if dtype is None:
            given = [published[k] for k in ("dtype", "torch_dtype") if published.get(k) is not None]
            dtypes = {str(dtype).removeprefix("torch.") for dtype in given}
            if len(dtypes) > 1:
                raise ValueError(f"dtype and torch_dtype disagree: {' and '.join(sorted(dtypes))}")
            dtype = (dtypes or {"float32"}).pop()
            if dtype not in DTYPES:
                raise ValueError(
                    f"dtype is {dtype!r}; load the weights as one of {', '.join(DTYPES)}, with dtype= or, in a run, "
                    "policies.dtype"
                )
        values: dict[str, Any] = {name: published[name] for name in _REQUIRED}
        values |= {name: published.get(name) for name in TOKENS}
        return cls(**values, rope_theta=_rope_theta(published), dtype=dtype)

    def to_hf(self) -> dict[str, Any]:
        """The content of a `config.json` that older and newer readers understand, in both spellings."""
        eos = list(self.eos_token_id) if isinstance(self.eos_token_id, tuple) else self.eos_token_id
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            **{name: getattr(self, name) for name in _REQUIRED},
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "rope_scaling": None,
            "dtype": self.dtype,
            "torch_dtype": self.dtype,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos,
            "pad_token_id": self.pad_token_id,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": self.num_hidden_layers,
            "initializer_range": 0.02,
            "use_cache": True,
        }


def _refuse_unsupported(published: Mapping[str, Any]) -> None:
    act = published.get("hidden_act", "silu")
    if act != "silu":
        raise ValueError(f"hidden_act is {act!r}; only 'silu' is supported")
    for name in ("attention_bias", "use_sliding_window", "quantization_config"):
        if published.get(name):
            raise ValueError(f"{name} is {published[name]!r}; it is not supported")
    unknown = set(published.get("layer_types") or ()) - {"full_attention"}
    if unknown:
        raise ValueError(
            f"layer_types has {', '.join(map(repr, sorted(unknown)))}; only 'full_attention' is supported"
        )
    for field in ("rope_scaling", "rope_parameters"):
        rope = published.get(field) or {}
        if not isinstance(rope, Mapping):
            raise ValueError(f"{field} is {rope!r}; it must be an object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(f"{field} asks for RoPE scaling {kind!r}; only plain RoPE is supported")
        unknown = set(rope) - {"rope_type", "type", "rope_theta"}
        if unknown:
            raise ValueError(
                f"{field} has {', '.join(map(repr, sorted(unknown)))}; only plain RoPE is supported"
            )


def _rope_theta(published: Mapping[str, Any]) -> float:
    places = (published, published.get("rope_parameters") or {}, published.get("rope_scaling") or {})
    thetas = [place["rope_theta"] for place in places if place.get("rope_theta") is not None]
    if not thetas:
        raise ValueError("the model configuration lacks rope_theta (it may also be in rope_parameters)")
    if any(theta != thetas[0] for theta in thetas):
        raise ValueError(f"rope_theta is written twice with different values: {thetas}")
    return thetas[0]


def _token_ids(name: str, ids: Any, vocab_size: int) -> int | tuple[int, ...] | None:
    if ids is None:
        return None
    many = tuple(ids) if isinstance(ids, list | tuple) else (ids,)
    for token in many:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            names = ", ".join(dict.fromkeys(("bos_token_id", "eos_token_id", name)))
            raise ValueError(
                f"{name} is {ids!r}; token ids of this model are 0..{vocab_size - 1}; "
                f"for a vocabulary without it pass None for {names}, or write null in config.json"
            )
    return many if isinstance(ids, list | tuple) else ids


def _presets(shapes: Mapping[str, Sequence[Any]], **common: Any) -> dict[str, ModelConfig]:
    """{name: model} of {name: sizes, in the order of `SIZES`}."""
    return {name: ModelConfig(**dict(zip(SIZES, s, strict=True)), **common) for name, s in shapes.items()}


PRESETS = _presets(
    {"0.6b": (1024, 3072, 28, 16, 8), "1.7b": (2048, 6144, 28, 16, 8), "4b": (2560, 9728, 36, 32, 8)},
    vocab_size=151936,
    head_dim=128,
    dtype="bfloat16",
    bos_token_id=151643,
    eos_token_id=151645,
) | _presets(
    {"xs": (64, 192, 2, 2, 1), "s": (96, 192, 4, 4, 2), "m": (192, 512, 4, 6, 2)},
    vocab_size=160,  # room for the micro tokenizer, a multiple of 32
    head_dim=32,
    rope_theta=1e4,
    max_position_embeddings=4096,
    eos_token_id=2,
    pad_token_id=0,
)
