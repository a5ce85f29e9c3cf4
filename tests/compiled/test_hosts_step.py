"""The compiled step over the devices of several processes, with nothing changed in the function."""

import pickle
from pathlib import Path

import jax
import numpy as np
import pytest
from closeness import close
from hosts_kit import play

SCRIPT = Path(__file__).with_name("hosts_run.py")


@pytest.mark.campaign
def test_two_processes_make_the_step_of_one_process_with_two_devices(tmp_path):
    play(SCRIPT, tmp_path / "logs", 1, tmp_path / "alone", devices=2)
    play(SCRIPT, tmp_path / "logs", 2, tmp_path / "shared")
    alone, *shared = (
        pickle.loads((tmp_path / name).read_bytes())
        for name in ("alone-0.pickle", "shared-0.pickle", "shared-1.pickle")
    )
    size = 0.0
    for whole, *parts in zip(alone, *shared, strict=True):
        table, metrics, trees, _ = whole
        for name in ("tokens", "reward", "advantage"):  # each process has the rows of its own problems
            np.testing.assert_array_equal(
                np.concatenate([part[0][name] for part in parts]), table[name], name
            )
        logprobs = np.concatenate([part[0]["logprobs"] for part in parts])
        np.testing.assert_allclose(logprobs, table["logprobs"], rtol=0, atol=1e-6)
        for _, told, weights, learner in parts:
            assert told["reward"] == metrics["reward"] > 0
            mine, theirs = (one["policy"]["p0"]["applied"]["grad_norm"] for one in (told, metrics))
            size = max(
                size, theirs
            )  # terms that cancel are rounded by their own size, see `test_one_meaning`
            close(mine, theirs, of=size)
            assert mine > 0
            for one, other in zip(
                jax.tree.leaves((weights, learner)), jax.tree.leaves(parts[0][2:]), strict=True
            ):
                assert one.tobytes() == other.tobytes()  # replicas
        moved = [np.abs(a - b).max() for a, b in zip(jax.tree.leaves(parts[0][2]), jax.tree.leaves(trees))]
        assert max(moved) < 1e-5
