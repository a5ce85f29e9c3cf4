"""Run by test_hosts_step.py, as one of several processes: COORDINATOR PROCESS HOSTS OUT.

The same function under the same shard_map, over the devices of one process or of several: nothing in it knows of hosts.
"""

import pickle
import sys
from pathlib import Path

import jax
import numpy as np
from both_roads import small
from jax._src import distributed
from jax.sharding import NamedSharding, PartitionSpec

from marl_jax import compiled, hosts
from marl_jax.runs.loading.parts import load_parts

COORDINATOR, PROCESS, HOSTS, OUT = sys.argv[1:]
WHOLE, CUT = PartitionSpec(), PartitionSpec("data")


def main():
    changes = {"data.problems": "8", "sampling.max_new_tokens": "24", "workflow.settings.rounds": "2"}
    config = small("eval_opt-shared-xs-math", **changes)
    parts = load_parts(config)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    step = jax.jit(
        jax.shard_map(
            compiled.make_step(config, parts=parts, data_axis="data"),
            mesh=mesh,
            in_specs=(WHOLE, CUT, CUT),
            out_specs=(WHOLE, CUT, WHOLE),
            check_vma=False,
        )
    )

    def over(tree, spec):  # every process has the whole value, and gives its devices their part of it
        place = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(place, np.asarray(x), np.shape(x)), tree
        )

    def here(tree):
        return jax.tree.map(lambda x: np.concatenate([s.data for s in x.addressable_shards]), tree)

    state, found = over(compiled.start(config, parts=parts), WHOLE), []
    batches = compiled.batches(config, parts=parts)
    for _ in range(2):
        words, tasks = next(batches)
        given = state, over(words, CUT), over(tasks, CUT)
        if not found:
            step = step.lower(*given).compile()
            # The first exchange of data waits half a minute for the others, who may compile longer.
            if int(HOSTS) > 1:
                distributed.global_state.client.wait_at_barrier("compiled", 600_000)
        state, columns, metrics = step(*given)
        names = ("tokens", "logprobs", "reward", "advantage")
        table = {name: here(getattr(columns.table, name)) for name in names}
        whole = jax.tree.map(
            lambda x: np.asarray(x.addressable_data(0)), (metrics, state.trees, state.learner)
        )
        found.append((table, *whole))
    Path(f"{OUT}-{PROCESS}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    if int(HOSTS) > 1:
        with hosts.joined(int(HOSTS), COORDINATOR, int(PROCESS), wait_s=60.0):
            main()
    else:
        main()
