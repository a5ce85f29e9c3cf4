"""A step of the compiled road as programs: one that plays, and one update for each policy.

    Halves ──Layout: devices, seeds──► traced ──compiled side by side──► programs ──take_step──► after, columns, metrics

Smaller programs are compiled, and later loaded, side by side. XLA loads them sooner, too: for each fusion of a certain
kind it looks through the whole program.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from marl_jax import compiled
from marl_jax.compiled.learn import evidence

WHOLE, CUT = PartitionSpec(), PartitionSpec("data")


class Layout(NamedTuple):
    """Where a step runs, and on what of its arguments."""

    devices: Sequence[jax.Device]
    whole: Sharding  # of metrics and of states, but for weights that are cut
    cut: Sharding  # of problems and the table
    # A function of a state and so many other arguments, and the specs of its results, as it is laid out.
    lay: Callable[[Callable[..., Any], int, Any], Callable[..., Any]] = lambda function, *_: function

    @classmethod
    def on(cls, device: jax.Device, seeds: bool = False) -> "Layout":
        """One device, with the `seeds` of a leading axis in one program."""
        place = SingleDeviceSharding(device)
        return cls([device], place, place, *[_over_seeds] * seeds)

    @classmethod
    def over(cls, mesh: Mesh) -> "Layout":
        """Devices that share the problems along "data"; XLA cuts the work with weights that lie along "model"."""

        def lay(function: Callable[..., Any], given: int, made: Any) -> Callable[..., Any]:
            specs = (WHOLE, *[CUT] * given)
            return jax.shard_map(
                function, mesh=mesh, in_specs=specs, out_specs=made, axis_names={"data"}, check_vma=False
            )

        # Over an axis of one device `psum` does not compile beside one that is left to XLA, so none is mapped.
        devices, shared = mesh.devices.flatten().tolist(), mesh.shape["data"] > 1
        return cls(devices, NamedSharding(mesh, WHOLE), NamedSharding(mesh, CUT), *[lay] * shared)

    def place(self, state: Any) -> Any:
        """A copy of every leaf on each device; those that lie on their mesh already stay as they are."""

        def where(leaf: Any) -> Sharding:
            on = getattr(leaf, "sharding", None)
            if isinstance(on, NamedSharding) and on.mesh == getattr(self.whole, "mesh", None):
                return on
            return self.whole

        return jax.device_put(state, jax.tree.map(where, state))

    def step(self, step: compiled.Step) -> Callable[..., Any]:
        """The whole step as one function, whose returned state has only the parts that a step changes."""

        def changing(*given: Any) -> tuple[Any, Any, Any]:
            after, columns, metrics = step(*given)
            return (after.trees, after.learner), columns, metrics

        return self.lay(changing, 2, (WHOLE, CUT, WHOLE))


def trace(halves: compiled.Halves, layout: Layout, given: Sequence[Any]) -> Iterator[jax.stages.Traced]:
    """The program that plays, then the update of each policy, in the order of their names.

    One by one, so that the first can be compiled while the next is traced.
    """
    whole, cut = layout.whole, layout.cut
    play = jax.jit(layout.lay(halves.play, 2, (CUT, WHOLE)), out_shardings=(cut, whole)).trace(*given)
    yield play
    leaves, table = jax.tree.flatten(play.out_info[0])
    leaves = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=cut) for x in leaves]

    def learning(policy: str) -> jax.stages.Traced:
        def learn(state: compiled.State, leaves: list[jax.Array]) -> tuple[Any, Any, Any]:
            after, columns, metrics = halves.learn(policy, state, jax.tree.unflatten(table, leaves))
            return (after.trees[policy], after.learner[policy]), evidence(columns), metrics

        # New weights lie as the old ones did.
        own = jax.tree.map(lambda leaf: leaf.sharding, (given[0].trees[policy], given[0].learner[policy]))
        laid = layout.lay(learn, 1, (WHOLE, CUT, WHOLE))
        return jax.jit(laid, out_shardings=(own, cut, whole)).trace(given[0], leaves)

    yield from map(learning, sorted(given[0].trees))


def take_step(
    programs: Sequence[Callable[..., Any]], state: compiled.State, *given: Any
) -> tuple[Any, Any, Any]:
    """(trees and learner, columns, metrics) of a step by its programs."""
    (columns, metrics), reports = programs[0](state, *given), {}
    for program, policy in zip(programs[1:], sorted(state.trees)):
        (tree, own), seen, reports[policy] = program(state, jax.tree.leaves(columns))
        state = state.replace(trees={**state.trees, policy: tree}, learner={**state.learner, policy: own})
        columns = columns.replace(**seen)
    return (state.trees, state.learner), columns, {"policy": reports, **metrics}


def _over_seeds(function: Callable[..., Any], given: int, _: Any) -> Callable[..., Any]:
    """Frozen weights are those of all seeds together."""
    axes = compiled.State(trees=0, learner=0, step=0, bases=None, references=None)  # type: ignore[arg-type]
    return jax.vmap(function, in_axes=(axes, *[0] * given), axis_name="seeds")
