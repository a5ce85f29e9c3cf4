"""The user's cache folder: files that can be made again and belong to no run.

$MARL_JAX_CACHE, else $XDG_CACHE_HOME/marl_jax, else ~/.cache/marl_jax
    prepared data sets    compiled/  (compile_cache)    measured/  (planning.step_times)
"""

import contextlib
import functools
import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from marl_jax.errors import UserError

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def home(given: str | os.PathLike[str] | None = None) -> Path:
    """The folder; `given` takes precedence."""
    shared = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "marl_jax"
    path = os.path.expanduser(given or os.environ.get("MARL_JAX_CACHE") or shared)
    if path.startswith("~"):
        raise UserError(f"there is no home directory for '{path}': set MARL_JAX_CACHE to a directory")
    return Path(path)


@functools.cache
def processor() -> str:
    """The kind of this machine's processor, and how many of them the process may use."""
    names = _cpu_lines("model name", "flags", "Features")
    return " ".join([platform.machine(), *dict.fromkeys(names), platform.processor(), f"{cores()} cores"])


def cores() -> int:
    """How many the process may use: of a quota, as containers have, rounded up."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroups("cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with contextlib.suppress(OSError, ValueError):  # "max", or no such file
                quota, period = map(int, " ".join((folder / name).read_text() for name in names).split())
                count = min(count, max(1, -(-quota // period))) if quota > 0 else count
    return count


def memory_left() -> int | None:
    """Bytes that a container or a job of a cluster leaves this process; None without a limit."""
    left = []
    for folder in _cgroups("memory"):
        for limit, used, files in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with contextlib.suppress(OSError, ValueError):
                read = lambda name, folder=folder: (folder / name).read_text()
                counted = dict(line.split() for line in read("memory.stat").splitlines())
                cached = int(counted.get(files, 0))  # of files, which give way
                left.append(int(read(limit)) - int(read(used)) + cached)
    return max(min(left), 0) if left else None


def _cgroups(controller: str) -> Iterator[Path]:
    """The folders with the limits of this process, its own first, then those around it."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (PROC / "self/cgroup").read_text().splitlines()
    for line in lines:
        _, names, path = line.split(":", 2)
        if not names or controller in names.split(","):  # version 2 has one tree for all
            root = CGROUPS / (controller if names else "")
            here = root / path.lstrip("/")
            yield from (
                folder for folder in (here, *here.parents) if folder == root or root in folder.parents
            )


def as_usual(path: Path, mode: int) -> None:
    """Give what was made for its owner alone the rights of other files: `mode`, less what the user's umask takes."""
    umask = os.umask(0o077)  # it can be read only by setting another
    os.umask(umask)
    path.chmod(mode & ~umask)


def machine() -> str:
    """Number and kind of the processors, for people."""
    names = _cpu_lines("model name")
    return f"{os.cpu_count()} x {names[0] if names else platform.processor() or platform.machine()}"


def _cpu_lines(*begins: str) -> list[str]:
    """The values of the lines of /proc/cpuinfo that begin with one of these names."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.partition(":")[2].strip() for line in lines if line.startswith(begins)]


def digest(*parts: Any) -> str:
    """A digest of values that JSON can hold, for a file's name."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def load(path: Path) -> dict[str, Any]:
    """The JSON object in a file; nothing where it is missing or broken."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    return {}


def store(path: Path, value: Mapping[str, Any]) -> None:
    """Write the object if possible: without the file, it is only computed again."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(value), encoding="utf-8")
        os.replace(unfinished, path)
