"""A step of the compiled road as programs: one that plays, and one update for each policy.

    Halves ──Layout: devices, seeds──► traced ──compiled side by side──► programs ──take_step──► after, columns, metrics

Smaller programs are compiled, and later loaded, side by side. XLA also loads them sooner, because for each fusion of a
certain kind it scans the whole program.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from marl_jax import compiled

WHOLE, CUT = PartitionSpec(), PartitionSpec("data")


class Layout(NamedTuple):
    """The devices of a step, and how its arguments are placed on them."""

    devices: Sequence[jax.Device]
    whole: Sharding  # of metrics and of states, except for sharded weights
    cut: Sharding  # of problems and the table
    # (function, number of its arguments after the state, specs of its results) -> the function on the devices.
    lay: Callable[[Callable[..., Any], int, Any], Callable[..., Any]] = lambda function, *_: function

    @classmethod
    def on(cls, device: jax.Device, seeds: bool = False) -> "Layout":
        """One device; with `seeds`, the seeds of a leading axis run in one program."""
        place = SingleDeviceSharding(device)
        return cls([device], place, place, *[_over_seeds] * seeds)

    @classmethod
    def over(cls, mesh: Mesh) -> "Layout":
        """Devices that share the problems along "data"; XLA splits the work of weights sharded along "model"."""

        def lay(function: Callable[..., Any], others: int, results: Any) -> Callable[..., Any]:
            specs = (WHOLE, *[CUT] * others)
            return jax.shard_map(
                function, mesh=mesh, in_specs=specs, out_specs=results, axis_names={"data"}, check_vma=False
            )

        # `psum` over an axis of one device does not compile next to an axis that is left to XLA, so none is mapped.
        devices, shared = mesh.devices.flatten().tolist(), mesh.shape["data"] > 1
        return cls(devices, NamedSharding(mesh, WHOLE), NamedSharding(mesh, CUT), *[lay] * shared)

    def place(self, state: Any) -> Any:
        """A copy of every leaf on each device; leaves that are on their mesh already stay as they are."""

        def sharding_of(leaf: Any) -> Sharding:
            sharding = getattr(leaf, "sharding", None)
            if isinstance(sharding, NamedSharding) and sharding.mesh == getattr(self.whole, "mesh", None):
                return sharding
            return self.whole

        return jax.device_put(state, jax.tree.map(sharding_of, state))

    def step(self, halves: compiled.Halves) -> Callable[..., Any]:
        """The step as one function: (trees and learner, table, metrics); the count of steps is the caller's."""
        return self.lay(halves.changes, 2, (WHOLE, CUT, WHOLE))


def trace(halves: compiled.Halves, layout: Layout, args: Sequence[Any]) -> Iterator[jax.stages.Traced]:
    """The program that plays, then the update program of each policy, in the order of their names.

    They are traced one by one, so that the first can be compiled while the next is traced.
    """
    whole, cut = layout.whole, layout.cut
    play = jax.jit(layout.lay(halves.play, 2, (CUT, WHOLE)), out_shardings=(cut, whole)).trace(*args)
    yield play
    leaves, table = jax.tree.flatten(play.out_info[0])
    leaves = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=cut) for x in leaves]

    def learning(policy: str) -> jax.stages.Traced:
        def learn(state: compiled.State, leaves: list[jax.Array]) -> Any:
            return halves.learn(policy, state, jax.tree.unflatten(table, leaves))

        # New weights are placed as the old ones were.
        placed = jax.tree.map(lambda leaf: leaf.sharding, (args[0].trees[policy], args[0].learner[policy]))
        laid = layout.lay(learn, 1, (WHOLE, CUT, WHOLE))
        return jax.jit(laid, out_shardings=(placed, cut, whole)).trace(args[0], leaves)

    yield from map(learning, sorted(args[0].trees))


def take_step(
    programs: Sequence[Callable[..., Any]], state: compiled.State, *args: Any
) -> tuple[Any, Any, Any]:
    """(trees and learner, columns, metrics) of a step by its programs."""
    play, *updates = programs
    program_of = dict(zip(sorted(state.trees), updates))
    learn = lambda policy, before, columns: program_of[policy](before, jax.tree.leaves(columns))
    return compiled.Halves(play, learn).changes(state, *args)


def _over_seeds(function: Callable[..., Any], others: int, _: Any) -> Callable[..., Any]:
    """The function over a leading axis of seeds; they share the frozen weights."""
    axes = compiled.State(trees=0, learner=0, step=0, bases=None, references=None)  # type: ignore[arg-type]
    return jax.vmap(function, in_axes=(axes, *[0] * others), axis_name="seeds")
