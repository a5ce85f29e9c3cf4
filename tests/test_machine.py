"""What a container or a job of a cluster leaves of the machine is what a process counts with."""

import pytest

from marl_jax import user_cache
from marl_jax.sampling import shapes

GIB = 1 << 30
STAT = f"anon 5\ninactive_file {GIB // 4}\ntotal_inactive_file {GIB // 4}\n"


def two(limit):
    """Files of version 2."""
    return {"memory.max": limit, "memory.current": str(GIB), "memory.stat": STAT}


def one(limit):
    """Files of version 1."""
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": str(GIB), "memory.stat": STAT}


def at(folder, files):
    return {f"{folder}/{name}": text for name, text in files.items()}


PLACES = {
    "a container": ("0::/\n", {"cpu.max": "150000 100000", **two(str(2 * GIB))}, 2, 1.25),
    "a job of a cluster": (
        "0::/slurm/job_7/step_0\n",
        at("slurm/job_7", {"cpu.max": "400000 100000", **two(str(3 * GIB))})
        | at("slurm/job_7/step_0", {"cpu.max": "max 100000", **two("max")}),
        4,
        2.25,
    ),
    "version 1, whose folders are of the host": (
        "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n",
        at("memory", one(str(2 * GIB)))
        | at("cpu", {"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"}),
        1,
        1.25,
    ),
    "no limit": (
        "4:memory:/\n3:cpu:/\n0::/\n",
        at("memory", one("9223372036854771712"))
        | at("cpu", {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}),
        64,
        None,
    ),
    "nothing of the kind": ("", {}, 64, None),
}


@pytest.mark.parametrize(("own", "files", "cores", "gib"), PLACES.values(), ids=list(PLACES))
def test_the_least_of_all_limits_around_a_process_holds(own, files, cores, gib, tmp_path, monkeypatch):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(own)
    for name, text in files.items():
        (tmp_path / "sys" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys" / name).write_text(text)
    monkeypatch.setattr(user_cache, "PROC", tmp_path / "proc")
    monkeypatch.setattr(user_cache, "CGROUPS", tmp_path / "sys")
    monkeypatch.setattr(user_cache.os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert user_cache.cores() == cores
    left = user_cache.memory_left()
    assert (left is None or left > 1 << 40) if gib is None else left == gib * GIB
    assert gib is None or shapes.host_bytes() <= gib * GIB
