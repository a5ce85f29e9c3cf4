"""The data sets by name, and `load`: name, directory, split -> a sequence of Task.

A data set of files is read from the user's directory (parquet, JSONL or a JSON list, as published), or downloaded if no
directory is given. A procedural data set is generated.
"""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from absl import logging

from marl_jax import user_cache
from marl_jax.fields import nearest
from marl_jax.task import Family, Task
from marl_jax.tasks import micro, schemas
from marl_jax.tasks.row_files import DataError, Row, RowError, list_files, named_split, read_rows
from marl_jax.tasks.splits import assign
from marl_jax.tasks.task_checks import check_task

if TYPE_CHECKING:
    from marl_jax.tasks.builders import Download, Rows, TaskBuilder, Tasks

BadRows = Literal["refuse", "skip"]
_RAW = "https://raw.githubusercontent.com/{}"


def _hub(repository: str, *files: str) -> tuple[str, ...]:
    return tuple(f"https://huggingface.co/datasets/{repository}/resolve/main/{file}" for file in files)


@dataclasses.dataclass(frozen=True)
class Source:
    """A published data set: the schema of its rows, the addresses of its files, and its splits."""

    family: Family | None  # None: each row states it
    schema: Callable[[Row], schemas.Fields]  # from a row to the fields of a task
    what: str  # description in a few words
    urls: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # published split -> files
    folder: str = ""  # folder of the data files in the published repository
    test: int | float = 0.1  # rows, or share of rows, held out of train if no test split is published
    split_of: Callable[[Row], str] | None = None  # the split of a row, if rows state it and not file names
    study_rows: int = 0  # number of rows in the study, whose splits follow from exactly this number
    repeated: Callable[[Row], str | None] | None = None  # key of a row; only the first row with a key counts


SOURCES: dict[str, Source] = {
    "dapo_math": Source(
        "math",
        schemas.dapo_math,
        "competition problems with integer answers; the study's",
        {"train": _hub("open-r1/DAPO-Math-17k-Processed", "en/train-00000-of-00001.parquet")},
        folder="en",
        study_rows=14116,
        repeated=schemas.dapo_repeated,
    ),
    "deepcoder": Source(
        "code",
        schemas.deepcoder,
        "programming problems with many tests; the study's",
        {
            "train": _hub(
                "agentica-org/DeepCoder-Preview-Dataset",
                *(f"primeintellect/train-{i:05}-of-00005.parquet" for i in range(5)),
            )
        },
        folder="primeintellect",
        test=1000,
    ),
    "gsm8k": Source(
        "math",
        schemas.gsm8k,
        "grade-school word problems",
        {split: _hub("openai/gsm8k", f"main/{split}-00000-of-00001.parquet") for split in ("train", "test")},
        folder="main",
    ),
    "math500": Source(
        "math",
        schemas.math500,
        "500 competition problems of MATH; for tests",
        {"test": _hub("HuggingFaceH4/MATH-500", "test.jsonl")},
    ),
    "aime24": Source(
        "math",
        schemas.aime,
        "the 30 problems of AIME 2024; for tests",
        {"test": _hub("HuggingFaceH4/aime_2024", "data/train-00000-of-00001.parquet")},
    ),
    "aime25": Source(
        "math",
        schemas.aime,
        "the 30 problems of AIME 2025; for tests",
        {"test": _hub("opencompass/AIME2025", "aime2025-I.jsonl", "aime2025-II.jsonl")},
    ),
    "mbpp": Source(
        "code",
        schemas.mbpp,
        "short Python functions with assertions",
        {"all": (_RAW.format("google-research/google-research/master/mbpp/mbpp.jsonl"),)},
        folder="full",
        split_of=schemas.mbpp_split,
    ),
    "humaneval": Source(
        "code",
        schemas.humaneval,
        "164 Python functions to complete; for tests",
        {"test": (_RAW.format("openai/human-eval/master/data/HumanEval.jsonl.gz"),)},
    ),
    "jsonl": Source(None, schemas.generic, "your rows in data.directory: question, and gold or tests"),
}
NAMES = (*micro.KINDS, *SOURCES)
_MICRO_SIZES = {"train": 4096, "val": 256, "test": 512}


def load(
    name: str,
    directory: str | os.PathLike[str] | None = None,
    split: str = "train",
    *,
    seed: int = 0,
    val_size: int | None = None,
    size: int | None = None,
    levels: Sequence[int] = (1, 2, 3),
    bad_rows: BadRows = "refuse",
    family: Family | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> "Tasks":
    """The tasks of a split: train, val (taken from train by seed if none is published) or test.

    `val_size` is for data sets of files (0: no val split, train stays whole, as in the study), `size` and `levels` are
    for procedural ones; `seed` draws the val split, or the problems. A broken row, or a row of another family than
    `family`, is an error that names its file and number. bad_rows="skip" leaves it out, counts it in `Tasks.skipped`,
    and keeps every other row in its split. Prepared data goes to `cache` (default: the user's, see
    `user_cache`). If the test split has its own files, "test" reads only these and other splits do not read them.
    """
    from marl_jax.tasks import builders

    if split not in ("train", "val", "test"):
        raise DataError(f"unknown split {split!r}: there are train, val and test")
    if name in micro.KINDS:
        count = _MICRO_SIZES[split] if size is None else size
        if count < 1:
            raise DataError(f"{name}: size is {count}, at least 1 is needed")
        splits = lambda _: {split: enumerate(micro.take(name, split, count, seed=seed, levels=levels))}
        key = _key(split, count, seed, tuple(levels))
        built = builders.prepare(name, key, splits, user_cache.home(cache))
        return builders.read(built, split, split, np.arange(count))
    if name not in SOURCES:
        near = nearest(name, NAMES, ".", 0.4)
        raise DataError(f"unknown data set {name!r}{near} There are {', '.join(NAMES)}")
    if bad_rows not in ("refuse", "skip"):
        raise DataError(f"bad_rows is {bad_rows!r}; it must be 'refuse' or 'skip'")
    source = SOURCES[name]
    if directory is None and not source.urls:
        raise DataError(f"{name}: give the directory of its files")
    published = source.urls if directory is None else _split_files(source, Path(directory))
    unread = _unread(source, published, split)
    wanted = {part: files for part, files in published.items() if part not in unread}
    home = user_cache.home(cache)
    try:
        built = _build(name, directory is None, wanted, bad_rows, family or source.family, home)
    except DataError as error:
        fetched = home / "downloads" / name
        if directory is None and str(fetched) in str(error):  # it may be the page of a proxy
            raise DataError(f"{error}; remove the folder '{fetched}' to have it fetched again") from None
        raise
    rows = builders.sizes(built)
    if source.study_rows and rows.get("train") != source.study_rows:
        logging.warning("%s has %s rows, the study %s: its splits differ", name, rows, source.study_rows)
    if "test" in unread:
        rows["test"] = 0  # a test split is published, so none is held out of train
    parts = assign(rows, source.test, val_size=val_size, seed=seed)
    if split == "val" and val_size == 0:
        raise DataError(
            f"{name} has no val split with val_size=0: set val_size to the number of rows to take from train"
        )
    if split not in parts:
        raise DataError(f"{name} has no {split} split: it has {', '.join(parts)}")
    return builders.read(built, split, *parts[split])


def _build(
    name: str,
    remote: bool,
    wanted: Mapping[str, Sequence[Any]],
    bad_rows: BadRows,
    family: Family | None,
    home: Path,
) -> "TaskBuilder":
    """The prepared tensorflow-datasets builder of published splits, made from their addresses or their files."""
    from marl_jax.tasks import builders

    source = SOURCES[name]

    def splits(download: "Download") -> dict[str, "Rows"]:
        files = download(wanted) if remote else wanted
        if source.split_of:
            all_paths = [path for paths in files.values() for path in paths]
            rows = (row for path in all_paths for _, row in read_rows(path))
            files = dict.fromkeys(sorted({_split_of(source, row) for row in rows}) or ["train"], all_paths)
        return {
            split: _rows(name, source, family, split, paths, bad_rows == "skip")
            for split, paths in files.items()
        }

    origin: Any = wanted
    if not remote:
        origin = {split: [(path.name, _digest(path)) for path in paths] for split, paths in wanted.items()}
    return builders.prepare(name, _key(origin, bad_rows, family), splits, home)


def _rows(
    name: str, source: Source, family: Family | None, split: str, paths: Sequence[Path], skip: bool
) -> "Rows":
    """Yields (row number in the split, task); for a broken row that is skipped, its error instead of the task."""
    index, seen = 0, set[str]()
    for path in paths:
        for number, row in read_rows(path):
            if source.split_of and _split_of(source, row) != split:
                continue
            if source.repeated and isinstance(row, dict) and (key := source.repeated(row)) is not None:
                if key in seen:
                    continue
                seen.add(key)
            task_or_error = row
            if not isinstance(row, DataError):
                try:
                    task_or_error = _task(f"{name}/{split}/{index}", source, family, row)
                except RowError as error:
                    task_or_error = DataError(f"{path}, row {number}: {error}")
            if isinstance(task_or_error, DataError) and not skip:
                raise task_or_error
            yield index, task_or_error
            index += 1
    if not index:
        raise DataError(f"{', '.join(map(str, paths))}: no rows here")


def _task(name: str, source: Source, family: Family | None, row: Any) -> Task:
    if not isinstance(row, dict):
        raise RowError(f"is {type(row).__name__}, not an object with fields")
    fields: schemas.Fields = {"id": name, "family": source.family, **source.schema(row)}
    task = Task(**fields)
    check_task(task, family)
    return task


def _unread(source: Source, published: Collection[str], split: str) -> set[str]:
    """The published splits that are not needed to make `split`."""
    if source.split_of or not {"train", "test"} <= set(published):  # split by row
        return set()
    return set(published) - {"test"} if split == "test" else {"test"}


def _split_files(source: Source, directory: Path) -> dict[str, list[Path]]:
    """{published split: its files in a directory}, by the split in their names; names without one are of train."""
    try:
        paths = list_files(Path(os.path.expanduser(directory)), source.folder)
    except OSError as error:
        raise DataError(f"{directory}: cannot be read ({error.strerror})") from None
    only = "test" if set(source.urls) == {"test"} else ""  # a data set of a test split alone
    if only:  # a clone of the repository may have examples next to the data
        bare = lambda name: name.rpartition("/")[2].removesuffix(".gz")
        names = {bare(url) for urls in source.urls.values() for url in urls}
        paths = [path for path in paths if bare(path.name) in names] or paths
    splits = [only or named_split(path) or "train" for path in paths]
    evaluation = "test" if {*splits} - {"eval"} else "train"  # eval files are train if there are no others
    files: dict[str, list[Path]] = {}
    for path, split in zip(paths, splits):
        files.setdefault(evaluation if split == "eval" else split, []).append(path)
    return files


def _split_of(source: Source, row: Any) -> str:
    try:
        return source.split_of(row)  # type: ignore[misc]
    except (RowError, AttributeError):
        return "train"  # the schema will refuse this row


def _digest(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def _key(*parts: Any) -> str:
    """A hash of all inputs of prepared data, and of the code that reads and checks rows."""
    here = Path(__file__).parent
    files = sorted(path for room in (here, here.parent / "rewards") for path in room.rglob("*.py"))
    code = b"".join(path.read_bytes() for path in files)
    return hashlib.sha256(repr(parts).encode() + code).hexdigest()[:16]
