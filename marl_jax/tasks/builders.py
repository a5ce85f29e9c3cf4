"""Data sets as tensorflow-datasets builders: array_record on disk, read back as a sequence of `Task`.

    files or streams of tasks ──► TaskBuilder ──► array_record ──► Tasks

This is the only file that uses tensorflow-datasets; TensorFlow itself is never imported. The folder of a prepared
data set is named by a hash of all that its rows depend on, so a change of it gets a new folder.
"""

import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import logging as python_logging
import os
import shutil
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import tensorflow_datasets as tfds
import tree
from absl import logging
from tensorflow_datasets.core import shuffle
from tensorflow_datasets.core.download.util import DownloadError

from marl_jax import user_cache
from marl_jax.task import Task
from marl_jax.tasks.row_files import DataError
from marl_jax.tasks.task_checks import mark

if not hasattr(tree, "map_structure"):  # tensorflow_datasets fails at its first use
    raise DataError(f"'{tree.__file__}' hides the package 'tree' (dm-tree) that reads data sets: rename it")

VERSION = "1.0.0"
Rows = Iterator[tuple[int, Task | DataError]]  # row number from 0, and its task, or why the row is skipped
Download = Callable[[Mapping[str, Sequence[str]]], Mapping[str, Sequence[Path]]]
Splits = Callable[[Download], Mapping[str, Rows]]  # published split -> its rows

# Above this size tensorflow-datasets sorts a split through files that only TensorFlow can write. Tasks need no sorting.
shuffle.MAX_MEM_BUFFER_SIZE = 1 << 50
_FEATURES = {name: tfds.features.Text() for name in ("id", "family", "question", "gold")}
_JSON = ("tests", "public_tests", "meta")
_ALONE = threading.Lock()  # `_quiet` replaces stdout and stderr, which all threads share


class _Info(tfds.core.DatasetInfo):
    def initialize_from_bucket(self) -> None:
        """Do nothing: these data sets are in no public bucket, and the query would leave a temporary folder behind."""


class TaskBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """The builder of the data set `name`."""

    VERSION = tfds.core.Version(VERSION)

    def __init__(self, *, name: str, splits: Splits, **settings: Any):
        self.name = name  # tensorflow-datasets would derive it from the name of the class
        self._splits = splits
        self._report = tfds.core.MetadataDict()
        super().__init__(file_format="array_record", **settings)

    def _info(self) -> tfds.core.DatasetInfo:
        features = {**_FEATURES, "level": np.int32, **{name: tfds.features.Text() for name in _JSON}}
        return _Info(
            builder=self,
            description="Tasks of marl_jax. tests, public_tests and meta are JSON texts.",
            features=tfds.features.FeaturesDict(features),
            metadata=self._report,
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        def download(urls: Mapping[str, Sequence[str]]) -> Mapping[str, Sequence[Path]]:
            try:
                _reach(next(iter(urls.values()))[0])
                return dl_manager.download({split: list(links) for split, links in urls.items()})
            except (OSError, ValueError, DownloadError) as error:  # exceptions of requests are OSErrors
                reason = str(error).splitlines()[0]
                raise DataError(
                    f"{self.name}: cannot be fetched ({reason}): give the directory of its files"
                ) from None

        return {name: self._generate_examples(name, rows) for name, rows in self._splits(download).items()}

    def _generate_examples(self, split: str, rows: Rows) -> Iterator[tuple[int, dict[str, Any]]]:
        skipped, marks, why, digest, number = [], [], "", hashlib.sha256(), -1
        for number, task in rows:
            if isinstance(task, DataError):
                why = why or str(task)
                skipped.append(number)
                continue
            record = {name: getattr(task, name) for name in (*_FEATURES, "level")}
            record |= {name: json.dumps(getattr(task, name)) for name in _JSON}
            digest.update(json.dumps(record).encode())
            marks.append(mark(task.question))
            yield number, record
        self._report[split] = {
            "rows": number + 1,
            "skipped": skipped,
            "why": why,
            "marks": marks,
            "digest": digest.hexdigest(),
        }
        if len(skipped) == number + 1:
            raise DataError(f"{self.name}: split {split!r} has {number + 1} rows, none of them usable: {why}")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Tasks(Sequence[Task]):
    """Tasks of one split, read from disk one by one."""

    name: str  # name of the data set
    split: str  # train, val or test
    digest: str  # hash of the content of all rows, equal for every file format, and of the rows selected here
    marks: Sequence[str]  # hashes of the questions, see `task_checks.mark`
    skipped: int  # broken rows left out of all splits that were prepared together with this one
    records: Any  # records of the published split
    positions: np.ndarray  # positions of this split's records among them, in its order
    home: Path  # the folder of the prepared data

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        try:
            return _task(self.records[int(self.positions[index])])
        except (RuntimeError, AttributeError, ValueError) as error:
            raise _damaged(self.home, error) from None


def prepare(name: str, key: str, splits: Splits, cache: Path) -> TaskBuilder:
    """The builder of a data set with its data prepared, in a temporary folder that is renamed when it is complete."""
    home = cache / name / key
    make = functools.partial(TaskBuilder, name=name, splits=splits)
    if not home.is_dir():
        try:
            home.parent.mkdir(parents=True, exist_ok=True)
            work = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=home.parent))
            user_cache.apply_umask(work, 0o777)
        except OSError as error:
            raise _unwritable(home, str(error.strerror)) from None
        try:
            with _ALONE, _quiet():
                make(data_dir=work).download_and_prepare(download_dir=cache / "downloads")
            os.rename(work, home)
        except (OSError, RuntimeError) as error:
            full = any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT))
            if isinstance(error, RuntimeError) and not full:  # the writer of records raises one then
                raise
            if not home.is_dir():  # otherwise another process was first, with equal data
                raise _unwritable(home, " ".join(str(error).split())) from None
        finally:
            shutil.rmtree(work, ignore_errors=True)
    try:
        with _ALONE, _quiet():
            builder = make(data_dir=home)
            if not builder.info.metadata:
                raise ValueError("files are missing")
            return builder
    except Exception as error:  # whatever the parser of a broken file raises
        raise _damaged(home, error) from None


def _unwritable(home: Path, why: str) -> DataError:
    return DataError(
        f"tasks cannot be prepared in '{home.parent}' ({why:.200}): name another folder with "
        "MARL_JAX_CACHE=DIR, or --config.data.cache=DIR of a new run"
    )


def _damaged(home: Path, error: Exception) -> DataError:
    """The error for prepared data with files that are broken, or that a clean-up of old files removed."""
    why = " ".join(str(error).split())
    return DataError(
        f"the prepared data in '{home}' is damaged ({why:.80}): remove that folder; it is made anew"
    )


def read(builder: TaskBuilder, split: str, published: str, rows: np.ndarray) -> Tasks:
    """The given rows of a published split, in the given order; skipped rows are left out, with a warning."""
    report = builder.info.metadata
    parts = [report[name]["digest"].encode() for name in sorted(report)]
    if not np.array_equal(rows, np.arange(report[published]["rows"])):
        parts.append(rows.astype("<i8").tobytes())
    skipped = np.asarray(report[published]["skipped"], np.int64)
    kept = ~np.isin(rows, skipped)
    dropped = sum(len(part["skipped"]) for part in report.values())
    if not kept.all():
        logging.warning(
            "%s: %d of the %d rows of %s are broken and skipped; the first that was read: %s",
            *(builder.name, np.sum(~kept), len(rows), split, report[published]["why"]),
        )
    elif dropped:
        logging.warning("%s: %d rows of other splits are broken and skipped", builder.name, dropped)
    rows = rows[kept]
    positions = rows - np.searchsorted(skipped, rows)
    records = builder.as_data_source(split=published)
    marks = [report[published]["marks"][position] for position in positions]
    digest = hashlib.sha256(b"".join(parts)).hexdigest()
    home = Path(builder.data_dir).parents[1]
    return Tasks(builder.name, split, digest, marks, dropped, records, positions, home)


def sizes(builder: TaskBuilder) -> dict[str, int]:
    """Number of rows of each published split, broken rows included."""
    return {name: part["rows"] for name, part in builder.info.metadata.items()}


def _task(record: Mapping[str, Any]) -> Task:
    texts = {name: record[name].decode() for name in _FEATURES}
    parsed = {name: json.loads(record[name]) for name in _JSON}
    return Task.from_json({**texts, **parsed, "level": int(record["level"])})


def _reach(url: str) -> None:
    """Fail at once if there is no network; the download itself would retry for minutes."""
    with contextlib.suppress(urllib.error.HTTPError):  # the server answers; the download handles the status
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=10).close()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence progress bars, banners and info logs of tensorflow-datasets."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.WARNING)
    try:
        with open(os.devnull, "w") as null:
            try:
                with contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
                    yield
            finally:  # absl may have added a root handler, which would write to the closed file
                for handler in list(python_logging.root.handlers):
                    if getattr(handler, "stream", None) is null:
                        python_logging.root.removeHandler(handler)
    finally:
        logging.set_verbosity(verbosity)
