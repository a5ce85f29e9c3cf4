"""The user's cache folder: files that belong to no run and can be computed again; facts about the machine.

$MARL_JAX_CACHE, else $XDG_CACHE_HOME/marl_jax, else ~/.cache/marl_jax
    prepared data sets    compiled/  (compile_cache)    measured/  (planning)
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
    """The path of the cache folder; `given` takes precedence."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "marl_jax"
    path = os.path.expanduser(given or os.environ.get("MARL_JAX_CACHE") or default)
    if path.startswith("~"):
        raise UserError(f"there is no home directory for '{path}': set MARL_JAX_CACHE to a directory")
    return Path(path)


@functools.cache
def processor() -> str:
    """The kind of this machine's processor, and the number of cores that the process may use."""
    names = _cpu_lines("model name", "flags", "Features")
    return " ".join([platform.machine(), *dict.fromkeys(names), platform.processor(), f"{cores()} cores"])


def cores() -> int:
    """How many cores the process may use; a quota, as of a container, is rounded up."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroups("cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with contextlib.suppress(OSError, ValueError):  # "max", or no such file
                quota, period = map(int, " ".join((folder / name).read_text() for name in names).split())
                count = min(count, max(1, -(-quota // period))) if quota > 0 else count
    return count


def memory_left() -> int | None:
    """Bytes that this process may still use under the limit of a container or cluster job; None without a limit."""
    free = []
    for folder in _cgroups("memory"):
        for limit, used, page_cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with contextlib.suppress(OSError, ValueError):
                read = lambda name, folder=folder: (folder / name).read_text()
                stats = dict(line.split() for line in read("memory.stat").splitlines())
                cached = int(stats.get(page_cache, 0))  # cached files, freed on demand
                free.append(int(read(limit)) - int(read(used)) + cached)
    return max(min(free), 0) if free else None


def apply_umask(path: Path, mode: int) -> None:
    """Give a file or folder created as private the usual permissions: `mode` minus the bits of the user's umask."""
    umask = os.umask(0o077)  # the umask can only be read by setting one
    os.umask(umask)
    path.chmod(mode & ~umask)


def machine() -> str:
    """Number and kind of the processors, for display."""
    names = _cpu_lines("model name")
    return f"{os.cpu_count()} x {names[0] if names else platform.processor() or platform.machine()}"


def digest(*parts: Any) -> str:
    """A digest of JSON-like values, for the name of a file."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def load(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one if the file is missing or broken."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    return {}


def store(path: Path, value: Mapping[str, Any]) -> None:
    """Write the object. Failures are ignored: without the file, its content is computed again."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(value), encoding="utf-8")
        os.replace(unfinished, path)


def _cgroups(controller: str) -> Iterator[Path]:
    """The cgroup folders with the limits of this process: its own first, then its parents."""
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


def _cpu_lines(*begins: str) -> list[str]:
    """The values of the lines of /proc/cpuinfo that begin with one of these names."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.partition(":")[2].strip() for line in lines if line.startswith(begins)]
