"""Compiled JAX programs are kept between processes, in the user's cache folder.

        home/compiled/jax-VERSION-DIGEST/     a digest of the processor, the platforms and XLA's flags

JAX manages each folder: its keys cover everything else, and it removes the least recently used programs. A cached
program computes the same bits as a new one. A folder set by the user (JAX_COMPILATION_CACHE_DIR, jax.config) stays.
"""

import contextlib
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import jax

from marl_jax import user_cache

LIMIT = 1 << 30  # bytes of programs in a folder
UNUSED_S = 30 * 86400.0  # seconds after which unused folders of other versions or machines are removed
WORTH_S = 0.1  # seconds: programs that compile faster are not kept, because they are many
MAPPED = 0.5  # share of a process's limit of memory mappings at which its programs are dropped
_CACHE_WARNING = re.compile(r"persistent compilation cache entry for '([^']+)'")
_warned = False
_undroppable = 0  # mappings that remained after a drop: of programs compiled ahead of time, files and threads


def keep_programs() -> None:
    """Make JAX keep the programs that it compiles, or warn in one line if it cannot. The user's settings stay."""
    if _setting("compilation_cache_dir") is not None or not _setting("enable_compilation_cache"):
        return
    folder = _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        if _setting("compilation_cache_max_size") != -1 or "JAX_COMPILATION_CACHE_MAX_SIZE" not in os.environ:
            _remove_partial(folder)  # without a size limit JAX writes no times of last use
    except (OSError, filelock.Timeout) as error:
        why = getattr(error, "strerror", None) or "another process holds it"
        _warn_once(f"compiled programs are not kept: '{folder}' cannot be used ({why})")
        return
    _remove_unused(folder.parent, folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    for name, value in (
        ("compilation_cache_max_size", LIMIT),
        ("persistent_cache_min_compile_time_secs", WORTH_S),
    ):
        if f"JAX_{name}".upper() not in os.environ:
            jax.config.update(f"jax_{name}", value)
    _filter_warnings(folder)


def keep_nothing() -> None:
    """Turn the cache off, also in a folder that the user set."""
    jax.config.update("jax_enable_compilation_cache", False)


def make_room(wait: Callable[[], object] = lambda: None) -> bool:
    """Drop the process's jitted programs if it nears the system's limit of memory mappings; returns whether it did.

    On a CPU every kernel has mappings of its own, hundreds per program, and XLA aborts the process at the limit. A
    program that is used again is read from the cache or compiled. `wait` is called first: no program may be running.
    """
    global _undroppable
    if jax.default_backend() != "cpu":
        return False
    try:
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
        mapped = _mappings()
    except OSError:  # another system
        return False
    if mapped < max(MAPPED * limit, _undroppable + (1 - MAPPED) / 2 * limit):
        return False
    wait()
    jax.clear_caches()
    _undroppable = _mappings()
    return True


def _mappings() -> int:
    return Path("/proc/self/maps").read_bytes().count(b"\n")


def _setting(name: str) -> Any:
    """The current value of a JAX setting."""
    return getattr(jax.config, f"jax_{name}")


def _folder() -> Path:
    machine = user_cache.processor(), _setting("platforms"), os.environ.get("XLA_FLAGS", "")
    return user_cache.home() / "compiled" / f"jax-{jax.__version__}-{user_cache.digest(*machine)}"


def _remove_partial(folder: Path) -> None:
    """Remove programs without a time of last use: a process was killed while it wrote them."""
    with filelock.FileLock(folder / ".lockfile", timeout=10):  # the lock that JAX takes
        used = {path.name.removesuffix("-atime") for path in folder.glob("*-atime") if path.stat().st_size}
        for path in folder.glob("*-cache"):
            if path.name.removesuffix("-cache") not in used:
                path.unlink(missing_ok=True)


def _remove_unused(home: Path, current: Path) -> None:
    """Remove the folders of other versions and machines that have not been used for a long time."""
    with contextlib.suppress(OSError):
        os.utime(current)
        for folder in home.iterdir():
            if folder.is_dir() and folder != current and time.time() - folder.stat().st_mtime > UNUSED_S:
                shutil.rmtree(folder, ignore_errors=True)


def _filter_warnings(folder: Path) -> None:
    """Replace JAX's warnings about programs that it cannot read or write by one line; remove damaged files."""
    original: Callable[..., Any] = warnings.showwarning

    def show(message: Any, *rest: Any, **more: Any) -> None:
        match = _CACHE_WARNING.search(str(message))
        if match is None:
            original(message, *rest, **more)
            return
        for path in folder.glob(f"{match[1]}-*"):
            with contextlib.suppress(OSError):
                path.unlink()
        reason = str(message).partition(f"'{match[1]}': ")[2]
        _warn_once(f"a compiled program in '{folder}' cannot be used, so it is compiled again ({reason:.80})")

    warnings.showwarning = show
    warnings.filterwarnings("always", message="Error (reading|writing) persistent compilation cache")


def _warn_once(text: str) -> None:
    global _warned
    if not _warned:
        print(" ".join(text.split()), file=sys.stderr, flush=True)
    _warned = True
