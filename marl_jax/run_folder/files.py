"""Atomic writing of files, and one line of error when a disk is full."""

import contextlib
import errno
import io
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from marl_jax.errors import UserError

_FULL = {errno.ENOSPC: "No space left on device", errno.EDQUOT: "Disk quota exceeded"}
_LARGE = {errno.EFBIG: "File too large"}


class DiskFull(UserError, RuntimeError):
    """A file cannot grow; those that were complete before are unchanged."""


def write_atomically(path: Path, content: str | bytes, shared: bool = False) -> None:
    """Write a file that has either the old or the new content at every moment, even after a crash of the machine.

    A `shared` file may be written by several processes at the same time: it has the content of one of them.
    """
    own = f".{socket.gethostname()}-{os.getpid()}" if shared else ""
    unfinished = path.with_name(f".{path.name}{own}.unfinished")
    with disk_errors(path):
        try:
            with open(unfinished, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise
    sync_directory(path.parent)


def append(file: io.RawIOBase, data: bytes, sync: bool = False) -> None:
    """Append all data to an unbuffered file, which may take it in pieces; on an error, nothing is appended."""
    end = file.seek(0, os.SEEK_END)
    try:
        while data:
            data = data[file.write(data) or 0 :]
        if sync:
            os.fsync(file.fileno())
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(end)
        raise


def sync_file(path: Path) -> None:
    """Make a file that was written survive a crash, under its name."""
    sync_directory(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make names that were created in or removed from a directory survive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems sync only files
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """A context that raises errors of a full disk, from the system or a library, as `DiskFull`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, DiskFull):
            raise
        if _is_one_of(error, _FULL):
            why = f"the disk of '{path}' is full ({_free(path)} free): make room"
        elif _is_one_of(error, _LARGE):
            why = f"a file of '{path}' exceeds the size limit of files: raise the limit (ulimit -f)"
        else:
            raise
        raise DiskFull(f"{why} and start the same command again; what was saved before is intact") from error


def _is_one_of(error: BaseException | None, texts: Mapping[int, str]) -> bool:
    """Whether an error is one of these {errno: text}; libraries may wrap it, or keep only its text."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in texts:
            return True
        if any(text in str(error) for text in texts.values()):
            return True
        if isinstance(error, BaseExceptionGroup) and any(_is_one_of(one, texts) for one in error.exceptions):
            return True
        error = error.__cause__ or error.__context__
    return False


def _free(path: Path) -> str:
    existing = next((parent for parent in (path, *path.parents) if parent.exists()), Path("/"))
    return f"{shutil.disk_usage(existing).free / 2**20:,.1f} MiB"
