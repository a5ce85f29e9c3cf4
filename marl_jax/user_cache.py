"""The user's cache folder: files that can be made again and belong to no run.

$MARL_JAX_CACHE, else $XDG_CACHE_HOME/marl_jax, else ~/.cache/marl_jax
    prepared data sets    compiled/  (compile_cache)    measured/  (planning.measured)
"""

import contextlib
import functools
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marl_jax.errors import UserError

__all__ = ["cores", "digest", "home", "load", "machine", "processor", "store"]


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
    """How many the process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
