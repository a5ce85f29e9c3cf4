"""The table of a model's weights, from which everything else about them is derived.

Each `Weight` has a shape, a logical name for every axis, an initialiser and a published name. The table has four
uses: `random` values, `shardings` over a mesh, `abstract` shapes, and the map of published names (`hf`).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from marl_jax.models.model_config import ModelConfig

Tree = dict[str, Any]  # nested dictionaries of arrays, or of other leaves in place of arrays

# {logical axis: mesh axis that it is sharded over}
RULES: Mapping[str, str] = {"vocab": "model", "heads": "model", "kv_heads": "model", "mlp": "model"}


@dataclasses.dataclass(frozen=True)
class Weight:
    """One array of the model, layers stacked first. A published matrix is [out, in]; ours is [*in, *out]."""

    shape: tuple[int, ...]  # layers first where they are stacked
    axes: tuple[str, ...]  # logical names, one per dimension
    init: Callable[..., jax.Array]  # (key, shape, dtype) -> array
    hf: str  # published name; "{layer}" where the layers are stacked
    inputs: int = 0  # number of axes that are inputs of a published Linear [out, in]; 0: published as it is

    @property
    def stacked(self) -> bool:
        """Whether the array holds all layers."""
        return self.axes[0] == "layers"

    @property
    def published_names(self) -> list[str]:
        """One name, or one per layer if layers are stacked."""
        return [self.hf.format(layer=i) for i in range(self.shape[0])] if self.stacked else [self.hf]

    @property
    def published_shape(self) -> tuple[int, ...]:
        """The published shape of each of these names."""
        shape = self.shape[1:] if self.stacked else self.shape
        return (math.prod(shape[self.inputs :]), math.prod(shape[: self.inputs])) if self.inputs else shape


def table(config: ModelConfig) -> Tree:
    """A `Weight` for every array of the parameters of `config`, in a tree of the same structure."""
    c = config
    vocab, hidden, layers = c.vocab_size, c.hidden_size, c.num_hidden_layers
    heads, kv, dim, mlp = c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.intermediate_size
    normal, ones = jax.nn.initializers.normal, jax.nn.initializers.ones

    def norm(size: int, axis: str, name: str) -> Weight:
        return Weight((layers, size), ("layers", axis), ones, f"model.layers.{{layer}}.{name}.weight")

    def linear(
        shape: tuple[int, ...], axes: tuple[str, ...], std: float, name: str, inputs: int = 1
    ) -> Weight:
        hf = f"model.layers.{{layer}}.{name}_proj.weight"
        return Weight((layers, *shape), ("layers", *axes), normal(std), hf, inputs)

    inner = hidden**-0.5
    residual = (2 * layers) ** -0.5  # layers of a deeper model add less each, so the sum keeps its size
    outer = residual * (heads * dim) ** -0.5
    tree: Tree = {
        "embed": Weight((vocab, hidden), ("vocab", "embed"), normal(0.02), "model.embed_tokens.weight"),
        "layers": {
            "attn_norm": norm(hidden, "embed", "input_layernorm"),
            "q": linear((hidden, heads, dim), ("embed", "heads", "head_dim"), inner, "self_attn.q"),
            "k": linear((hidden, kv, dim), ("embed", "kv_heads", "head_dim"), inner, "self_attn.k"),
            "v": linear((hidden, kv, dim), ("embed", "kv_heads", "head_dim"), inner, "self_attn.v"),
            "o": linear((heads, dim, hidden), ("heads", "head_dim", "embed"), outer, "self_attn.o", inputs=2),
            "q_norm": norm(dim, "head_dim", "self_attn.q_norm"),
            "k_norm": norm(dim, "head_dim", "self_attn.k_norm"),
            "mlp_norm": norm(hidden, "embed", "post_attention_layernorm"),
            "gate": linear((hidden, mlp), ("embed", "mlp"), inner, "mlp.gate"),
            "up": linear((hidden, mlp), ("embed", "mlp"), inner, "mlp.up"),
            "down": linear((mlp, hidden), ("mlp", "embed"), residual * mlp**-0.5, "mlp.down"),
        },
        "final_norm": Weight((hidden,), ("embed",), ones, "model.norm.weight"),
    }
    if not c.tie_word_embeddings:
        tree["lm_head"] = Weight((hidden, vocab), ("embed", "vocab"), normal(inner), "lm_head.weight", 1)
    return tree


def random(key: jax.Array, config: ModelConfig) -> Tree:
    """Fresh parameters, drawn in float32, so that a bfloat16 model starts as the rounded float32 model."""
    weights, treedef = jax.tree.flatten(table(config))
    keys = jax.random.split(key, len(weights))
    arrays = [w.init(k, w.shape, jnp.float32).astype(config.dtype) for w, k in zip(weights, keys)]
    return jax.tree.unflatten(treedef, arrays)


def partition(weight: Weight, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Shard each axis over the mesh axis of its rule; an axis that the mesh axis does not divide is not sharded."""
    spec: list[str | None] = []
    for size, axis in zip(weight.shape, weight.axes):
        mesh_axis = RULES.get(axis)
        fits = mesh_axis in mesh.shape and mesh_axis not in spec and size % mesh.shape[mesh_axis] == 0
        spec.append(mesh_axis if fits else None)
    return PartitionSpec(*spec)


def shardings(config: ModelConfig, mesh: Mesh) -> Tree:
    """A `NamedSharding` per weight, for a mesh with axes such as ("data", "model")."""
    check_mesh(mesh)
    return jax.tree.map(lambda w: NamedSharding(mesh, partition(w, mesh)), table(config))


def share_per_device(config: ModelConfig, devices: int) -> float:
    """The part of all weights on each device along "model"; an axis that these do not divide is whole."""
    mesh = AbstractMesh((devices,), ("model",))
    weights = jax.tree.leaves(table(config))
    local = [NamedSharding(mesh, partition(w, mesh)).shard_shape(w.shape) for w in weights]
    return sum(map(math.prod, local)) / sum(math.prod(w.shape) for w in weights)


def check_mesh(mesh: Mesh) -> None:
    """Refuse axes that XLA does not shard along by itself; those of `jax.make_mesh` are such unless it is told."""
    if {*mesh.axis_types} != {AxisType.Auto}:
        raise ValueError(
            f"the mesh has the axes {', '.join(f'{n} ({t.name})' for n, t in zip(mesh.axis_names, mesh.axis_types))}: "
            f"make it with jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)})"
        )


def abstract(config: ModelConfig) -> Tree:
    """Shape and dtype of every parameter."""
    return jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.dtype(config.dtype)), table(config))


def check_params(config: ModelConfig, params: Tree, *, dtypes: bool = True) -> None:
    """Refuse parameters of other names, shapes or dtypes than those of the config."""
    specs = {jax.tree_util.keystr(path): spec for path, spec in jax.tree.leaves_with_path(abstract(config))}
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}
    if specs.keys() != leaves.keys():
        raise ValueError(
            f"the parameters and the config disagree on {listed(sorted(specs.keys() ^ leaves.keys()))}"
        )
    for name, spec in specs.items():
        leaf = leaves[name]
        if leaf.shape != spec.shape or (dtypes and leaf.dtype != spec.dtype):
            raise ValueError(
                f"{name} is {leaf.dtype}{list(leaf.shape)}; the config says {spec.dtype}{list(spec.shape)}"
            )


def listed(names: list[str]) -> str:
    """The first of some names, and how many more there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def num_parameters(config: ModelConfig) -> int:
    """The number of parameters of the model; a tied embedding counts once."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract(config)))
