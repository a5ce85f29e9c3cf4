"""Executables of the compiled road on disk: an equal run that starts later neither traces nor compiles.

    all inputs of a program ──digest──► CACHE/step-DIGEST-cache: its pytrees, its memory needs, the executable

CACHE is the folder of JAX's compilation cache (see `compile_cache`); JAX evicts these files together with its own,
the least recently used first. JAX has to trace and lower a step to find the name of its program. Here the name is a
digest of code, configuration and arguments; if they do not determine the program, nothing is stored. Like JAX's own
files, these are loaded as code, so the folder must be the user's own.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import pickle
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import filelock
import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

import marl_jax
from marl_jax import hosts, user_cache
from marl_jax.config.run_config import RunConfig
from marl_jax.own import is_own
from marl_jax.run_folder.files import write_atomically
from marl_jax.run_folder.folder import versions
from marl_jax.runs.loading.parts import Parts
from marl_jax.threads import run_parallel

ENVIRONMENT = ("XLA_", "LIBTPU_", "TPU_", "CUDA_", "NVIDIA_", "ROCM_")
DIGEST = hashlib.sha256().digest_size
OBJECTS = (b"\x7fELF", b"\xcf\xfa\xed\xfe")  # the first bytes of compiled code for a CPU


def file_of(config: RunConfig, parts: Parts, devices: Sequence[jax.Device], **more: Any) -> Path | None:
    """The file of a step's program on these devices; None if the program must not be stored.

    `more` describes its arguments: weights and problems only by their shapes, and nothing that depends on the seed.
    """
    folder = jax.config.values["jax_compilation_cache_dir"]
    off = not folder or "://" in folder or not jax.config.values["jax_enable_compilation_cache"]
    settings = {name: value for name, value in config.to_json().items() if name != "seed"}
    texts = [leaf for leaf in jax.tree.leaves(settings) if isinstance(leaf, str)]
    workflow, tokenizer = parts.workflow, parts.tokenizer
    built_in = all(str(form.__module__).startswith("marl_jax.") for form in (workflow.fn, workflow.in_arrays))
    # User code may import anything, and a module may have been loaded before it was changed.
    if off or hosts.count() > 1 or any(map(is_own, texts)) or not built_in or _changed():
        return None
    program = {
        "config": settings,
        "workflow": (workflow.name, repr(workflow.settings), parts.prompts.digest()),
        "tokenizer": (tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, repr(tokenizer)),
        "models": repr((parts.models, parts.specs, parts.lora_rank, parts.lora_scale)),
        "code": versions() | {"flax": importlib.metadata.version("flax")},
        "jax": jax.config.values,
        "environment": {name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT)},
        "backend": devices[0].client.platform_version,
        "machine": (user_cache.processor(), [(str(one), one.device_kind) for one in jax.devices()]),
        "devices": list(map(str, devices)),
        **more,
    }
    return Path(folder) / f"step-{user_cache.digest(program)}-cache"


def describe(arguments: Any) -> Any:
    """A description of a step's arguments: their shapes and placement."""
    leaves, tree = jax.tree.flatten(arguments)
    placement = [(str(getattr(x, "sharding", "")), str(getattr(x, "committed", ""))) for x in leaves]
    return str(tree), [repr(jax.typeof(x)) for x in leaves], placement


def load(place: Path | None, devices: Sequence[jax.Device], check: Callable[[Any], None]) -> list[Any] | None:
    """The programs stored at `place`, if `check` accepts their memory needs; None if they cannot be loaded."""
    if place is None:
        return None
    try:
        data = place.read_bytes()
        if hashlib.sha256(data[DIGEST:]).digest() != data[:DIGEST]:  # damaged
            return None
        needs, programs = pickle.loads(data[DIGEST:])
    except Exception:
        return None
    check(needs)

    def restore(code: bytes, in_tree: Any, out_tree: Any) -> Any:
        return serialize_executable.deserialize_and_load(
            zlib.decompress(code), in_tree, out_tree, backend=devices[0].client, execution_devices=devices
        )

    with contextlib.suppress(Exception):  # a read-only cache is used, too
        _write(place)
    with contextlib.suppress(Exception):  # XLA may refuse to load them
        return run_parallel("load", restore, *zip(*programs))
    return None


@contextlib.contextmanager
def jax_cache_hits(place: Path | None) -> Iterator[list[str]]:
    """Collect the hits in JAX's own cache within this context.

    If there is a file at `place`, it could not be loaded; that cache is off then: `keep` cannot store programs from it.
    """
    hits: list[str] = []
    record = lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None
    damaged = place is not None and place.exists()
    if damaged:
        _switch_jax_cache(False)
    jax.monitoring.register_event_listener(record)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(record)
        if damaged:
            _switch_jax_cache(True)


def _switch_jax_cache(on: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", on)
    compilation_cache.reset_cache()  # JAX decides at the first use whether its cache is on


def keep(
    place: Path | None, programs: Sequence[jax.stages.Compiled], needs: Any, hits: Sequence[str]
) -> None:
    """Store programs and their memory needs, unless JAX had one cached: XLA writes a loaded program without code."""
    if place is None or hits:
        return
    with contextlib.suppress(Exception):
        serialized = list(map(serialize_executable.serialize, programs))
        has_code = lambda program: any(map(program[0].__contains__, OBJECTS))
        if jax.default_backend() == "cpu" and not all(map(has_code, serialized)):
            return
        data = pickle.dumps((needs, [(zlib.compress(code, 1), *trees) for code, *trees in serialized]))
        _write(place, hashlib.sha256(data).digest() + data)


def _write(place: Path, data: bytes | None = None) -> None:
    """Record the time of use as JAX does, which evicts the least recently used files; write `data` if given."""
    with filelock.FileLock(place.with_name(".lockfile"), timeout=10):  # the lock that JAX takes
        time_of_use = place.with_name(place.name.replace("-cache", "-atime"))
        time_of_use.write_bytes(time.time_ns().to_bytes(8, "little"))
        if data is not None:
            write_atomically(place, data)


def _changed() -> bool:
    """Whether code of the library was changed after this process began to load it."""
    return any(path.stat().st_ctime > marl_jax.BEGAN for path in Path(marl_jax.__file__).parent.rglob("*.py"))
