"""Arrays of this process's devices as arrays of all devices, and back: each host already has a complete copy.

    tree of a host ──to_global──► tree over the mesh of all hosts ──program──► new tree ──to_local──► tree of a host

No byte is sent: an array over all hosts is made of the pieces that are on its devices.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from marl_jax.hosts.talk import from_all

Tree = Any


def mesh_of_all(data: int, model: int) -> Mesh:
    """`data` x `model` devices of every process, the processes side by side along the axis "data"."""
    by_process: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        by_process.setdefault(device.process_index, []).append(device)
    rows = [np.array(local[: data * model]).reshape(data, model) for _, local in sorted(by_process.items())]
    auto = (jax.sharding.AxisType.Auto,) * 2
    return Mesh(np.concatenate(rows), ("data", "model"), axis_types=auto)


def spans(mesh: Mesh | None) -> bool:
    """Whether a mesh has devices of other processes."""
    return mesh is not None and mesh.is_multi_process


def shardings_of(tree: Tree) -> Tree:
    """The shardings of its arrays; None for other leaves."""
    return jax.tree.map(lambda leaf: leaf.sharding if isinstance(leaf, jax.Array) else None, tree)


def to_global(tree: Tree, mesh: Mesh) -> Tree:
    """Equal arrays of every process as arrays over the mesh of all, replicated over "data"; other leaves are kept."""

    def lift(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or not leaf.is_fully_addressable:
            return leaf
        spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else PartitionSpec()
        # Moves only scalars: other arrays are there already.
        leaf = jax.device_put(leaf, NamedSharding(mesh.local_mesh, spec))
        pieces = [shard.data for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, NamedSharding(mesh, spec), pieces)

    return jax.tree.map(lift, tree)


def to_local(tree: Tree, shardings: Tree) -> Tree:
    """The copy of this process, with the `shardings_of` the tree before `to_global`."""

    def lower(leaf: Any, sharding: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            return leaf
        assert isinstance(leaf.sharding, NamedSharding)
        mesh = leaf.sharding.mesh
        spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
        wanted = NamedSharding(mesh, spec)
        if not leaf.sharding.is_equivalent_to(wanted, leaf.ndim):
            leaf = jax.jit(_identity, out_shardings=wanted)(leaf)
        if not isinstance(sharding, NamedSharding):
            return leaf.addressable_data(0)
        pieces = [shard.data for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, pieces)

    return jax.tree.map(lower, tree, shardings)


def sharded(arrays: Tree, mesh: Mesh) -> Tree:
    """Arrays of the host, equal on every process, sharded over "data": a device gets its rows from its own process."""
    over = NamedSharding(mesh, PartitionSpec("data"))
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(over, np.asarray(x), x.shape), arrays
    )


def on_host(tree: Tree) -> Tree:
    """Complete numpy arrays, on every process: each sends the pieces on its devices, all in one exchange.

    A piece that is on several devices is sent by one of them.
    """
    pieces = lambda x: [(s.index, np.asarray(s.data)) for s in x.addressable_shards if s.replica_id == 0]
    leaves, structure = jax.tree.flatten(tree)
    jax.block_until_ready(leaves)
    complete = [np.empty(leaf.shape, leaf.dtype) for leaf in leaves]
    for sent in from_all(lambda: [pieces(leaf) for leaf in leaves]):
        for array, parts in zip(complete, sent):
            for index, piece in parts:
                array[index] = piece
    return jax.tree.unflatten(structure, complete)


def fingerprint(tree: Tree) -> int:
    """A number that changes with the bits of the arrays and with their order; every process has a copy of them."""
    leaves = (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
    return sum((2 * place + 1) * int(sum_of_bits(leaf)) for place, leaf in enumerate(leaves))


@jax.jit
def sum_of_bits(leaf: jax.Array) -> jax.Array:
    """A number that changes with any bit, for dtypes of up to 32 bits. It sums integers, so order does not matter."""
    leaf = leaf if leaf.dtype.itemsize == 4 else leaf.astype(jnp.float32)
    words = jax.lax.bitcast_convert_type(leaf, jnp.uint32).ravel()
    places = 2 * jax.lax.iota(jnp.uint32, words.size) + 1
    return jnp.sum((words ^ (words >> 16)) * places, dtype=jnp.uint32)


def _identity(leaf: jax.Array) -> jax.Array:
    return leaf
