"""Programs that JAX compiled are kept between processes, in the user's cache folder.

        home/compiled/jax-VERSION-DIGEST/     the digest is of the processor, the platforms and XLA's flags

JAX keeps the programs and drops the least recently used; its keys tell the rest apart. A cached program computes the
same bits as one compiled anew. A folder that the user set (JAX_COMPILATION_CACHE_DIR, or jax.config) stays as it is.
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
UNUSED_S = 30 * 86400.0  # folders of other versions or machines unused for so long are removed
WORTH_S = 0.1  # of compilation: programs that took less are not kept; many are small
MAPPED = 0.5  # of the mappings that a process may have, before its programs are dropped
_ABOUT = re.compile(r"persistent compilation cache entry for '([^']+)'")
_told = False
_left = 0  # mappings after programs were dropped: those of programs compiled ahead, files and threads


def keep_programs() -> None:
    """Make JAX keep the programs that it compiles; warn in one line where it cannot. The user's settings stay."""
    if _setting("compilation_cache_dir") is not None or not _setting("enable_compilation_cache"):
        return
    folder = _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        if _setting("compilation_cache_max_size") != -1 or "JAX_COMPILATION_CACHE_MAX_SIZE" not in os.environ:
            _mend(folder)  # without a limit JAX keeps no times
    except (OSError, filelock.Timeout) as error:
        why = getattr(error, "strerror", None) or "another process holds it"
        _tell(f"compiled programs are not kept: '{folder}' cannot be used ({why})")
        return
    _forget(folder.parent, folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    for name, value in (
        ("compilation_cache_max_size", LIMIT),
        ("persistent_cache_min_compile_time_secs", WORTH_S),
    ):
        if f"JAX_{name}".upper() not in os.environ:
            jax.config.update(f"jax_{name}", value)
    _pass_over(folder)


def keep_nothing() -> None:
    """Turn the cache off, also in a folder that the user set."""
    jax.config.update("jax_enable_compilation_cache", False)


def make_room(wait: Callable[[], object] = lambda: None) -> bool:
    """Drop the process's jitted programs where it nears the system's limit of mappings; returns whether it did.

    On a CPU every kernel has mappings of its own, hundreds a program, and XLA ends the process at the limit. A program
    that is used again is read from the cache or compiled. `wait` is called first: no program may run meanwhile.
    """
    global _left
    if jax.default_backend() != "cpu":
        return False
    try:
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
        mapped = _mappings()
    except OSError:  # another system
        return False
    if mapped < max(MAPPED * limit, _left + (1 - MAPPED) / 2 * limit):
        return False
    wait()
    jax.clear_caches()
    _left = _mappings()
    return True


def _mappings() -> int:
    return Path("/proc/self/maps").read_bytes().count(b"\n")


def _setting(name: str) -> Any:
    """The present value of a setting of JAX."""
    return getattr(jax.config, f"jax_{name}")


def _folder() -> Path:
    machine = user_cache.processor(), _setting("platforms"), os.environ.get("XLA_FLAGS", "")
    return user_cache.home() / "compiled" / f"jax-{jax.__version__}-{user_cache.digest(*machine)}"


def _mend(folder: Path) -> None:
    """Remove programs without the time of their last use: a process was killed while it wrote them."""
    with filelock.FileLock(folder / ".lockfile", timeout=10):  # the lock that JAX takes
        whole = {path.name.removesuffix("-atime") for path in folder.glob("*-atime") if path.stat().st_size}
        for path in folder.glob("*-cache"):
            if path.name.removesuffix("-cache") not in whole:
                path.unlink(missing_ok=True)


def _forget(home: Path, current: Path) -> None:
    """Remove the folders of other versions and machines that were not used for long."""
    with contextlib.suppress(OSError):
        os.utime(current)
        for folder in home.iterdir():
            if folder.is_dir() and folder != current and time.time() - folder.stat().st_mtime > UNUSED_S:
                shutil.rmtree(folder, ignore_errors=True)


def _pass_over(folder: Path) -> None:
    """Print only the first of JAX's warnings of programs that it cannot read or write, and remove damaged files."""
    show: Callable[..., Any] = warnings.showwarning

    def shown(message: Any, *rest: Any, **more: Any) -> None:
        match = _ABOUT.search(str(message))
        if match is None:
            show(message, *rest, **more)
            return
        for path in folder.glob(f"{match[1]}-*"):
            with contextlib.suppress(OSError):
                path.unlink()
        reason = str(message).partition(f"'{match[1]}': ")[2]
        _tell(f"a compiled program in '{folder}' cannot be used, so it is compiled again ({reason:.80})")

    warnings.showwarning = shown
    warnings.filterwarnings("always", message="Error (reading|writing) persistent compilation cache")


def _tell(text: str) -> None:
    global _told
    if not _told:
        print(" ".join(text.split()), file=sys.stderr, flush=True)
    _told = True
