"""Broken files and rows: one clear line that names the place, or skipped and counted."""

import functools
import gzip
import json
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from published import dapo_row, deepcoder_row, helper_row, humaneval_row, jsonl, mbpp_row, parquet

from marl_jax.tasks import DataError, Task, builders, load
from marl_jax.tasks.task_checks import check_tasks, shared


def refuse(tmp_path, name, match, **settings):
    with pytest.raises(DataError, match=match) as error:
        load(name, tmp_path / "data", cache=tmp_path / "cache", **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


BROKEN_ROWS = [
    (
        "dapo_math",
        {k: v for k, v in dapo_row(3).items() if k != "prompt"},
        "field 'prompt' is missing .the row has",
    ),
    ("dapo_math", dapo_row(3) | {"solution": "  "}, "field 'solution' is empty"),
    ("dapo_math", dapo_row(3) | {"prompt": ["x"]}, "field 'prompt' is list, not text"),
    ("dapo_math", ["x"], "is list, not an object"),
    ("gsm8k", {"question": "1?", "answer": "just text"}, "does not end in '#### <number>'"),
    ("gsm8k", {"question": "1?", "answer": "so #### "}, "does not end in '#### <number>'"),
    ("math500", {"problem": "1?", "answer": "1", "level": "hard"}, "field 'level' is 'hard', not a number"),
    (
        "math500",
        {"problem": "1?", "answer": "1", "level": 10**12},
        "field 'level' is 1000000000000, not a number",
    ),
    ("aime25", {"problem": "1?\ud800", "answer": 1}, "field 'problem' holds half of a surrogate pair"),
    ("aime25", {"problem": "1?", "answer": True}, "field 'answer' is bool, not text"),
    ("aime25", {"problem": "1?", "answer": float("nan")}, "field 'answer' is nan, which is no answer"),
    ("deepcoder", deepcoder_row(1) | {"tests": "[]"}, "no tests: field 'tests' is empty"),
    ("deepcoder", deepcoder_row(1) | {"tests": "[{"}, "field 'tests' is not JSON"),
    ("deepcoder", deepcoder_row(1) | {"tests": "[" + "9" * 5000 + "]"}, "field 'tests' is not JSON .*digits"),
    (
        "deepcoder",
        deepcoder_row(1) | {"tests": '[{"testtype": "functional", "input": "[", "output": "1"}]'},
        "test 1 is not JSON",
    ),
    ("deepcoder", deepcoder_row(1) | {"tests": None}, "field 'tests' is NoneType, not a list of tests"),
    ("deepcoder", deepcoder_row(1) | {"tests": '[{"input": "1"}]'}, "test 1 has no input and output"),
    (
        "deepcoder",
        deepcoder_row(1) | {"tests": '[{"input": true, "output": "2"}]'},
        "test 1 has bool where text",
    ),
    ("dapo_math", dapo_row(3) | {"prompt": [{"role": "user"}]}, "field 'prompt' is missing"),
    ("deepcoder", deepcoder_row(1) | {"tests": '["1"]'}, "test 1 is str, not an object"),
    (
        "deepcoder",
        deepcoder_row(1) | {"tests": '[{"type": "function_call", "input": [1], "output": [2]}]'},
        "test 1 calls a function but has no function name",
    ),
    (
        "deepcoder",
        deepcoder_row(1)
        | {"tests": '[{"type": "function_call", "fn_name": "a b", "input": [1], "output": [2]}]'},
        "its tests cannot be run: .*not the name of a function",
    ),
    (
        "deepcoder",
        deepcoder_row(1) | {"tests": '[{"type": "sql", "input": "1", "output": "2"}]'},
        "unknown type 'sql'",
    ),
    ("mbpp", mbpp_row(601) | {"test_list": []}, "no tests: field 'test_list' is empty"),
    ("mbpp", mbpp_row(601) | {"test_list": ["assert ("]}, "test 1: the test code is not Python"),
    ("mbpp", mbpp_row(601) | {"test_list": ["print(add(1))"]}, "test 1 asserts nothing about the program"),
    ("mbpp", mbpp_row(601) | {"test_list": ["assert 1 == 1"]}, "test 1 asserts nothing about the program"),
    ("mbpp", mbpp_row(601) | {"task_id": "x"}, "field 'task_id' is 'x', not an integer"),
    ("humaneval", humaneval_row(1) | {"entry_point": None}, "field 'entry_point' is missing"),
    ("humaneval", humaneval_row(1) | {"test": "def check(candidate): pass"}, "asserts nothing"),
    ("jsonl", {"question": "1?"}, "field 'gold' or .* is missing"),
    ("jsonl", {"prompt": "1?", "tests": []}, "no tests"),
    (
        "jsonl",
        {"prompt": "1?", "tests": "def check(candidate):\n    assert candidate(1) == 2\n"},
        r"test 1 asserts nothing about the program \(def check\(candidate\): assert candidate",
    ),
    ("jsonl", {"prompt": "1?", "tests": ""}, "(?<=row 5: )test 1 asserts nothing about the program"),
    (
        "jsonl",
        {
            "prompt": "1?",
            "tests": [{"call": "f", "args": [], "expected": 1}, {"call": "1", "args": [], "expected": 1}],
        },
        "its tests cannot be run: test 2: call='1' is not",
    ),
    ("jsonl", {"question": "1?", "gold": "1", "level": 2**31}, "field 'level' is 2147483648; it must lie in"),
    ("jsonl", {"question": "1?", "answer": [1]}, "field 'answer' is list, not text"),
    ("jsonl", {"prompt": "1?", "tests": ["assert f(1) == 2"], "setup": 5}, "field 'setup' is int, not text"),
    ("jsonl", {"prompt": "1?", "tests": ["assert f(1) == 2"], "setup": ["x"]}, "field 'setup' is list, not"),
    (
        "jsonl",
        {"prompt": "1?", "tests": ["assert f(1) == 2"], "setup": "x = = 1"},
        "test 1: .*invalid syntax",
    ),
    (
        "jsonl",
        {"prompt": "1?", "tests": [{"call": 5, "args": [], "expected": 1}]},
        "call is int, expected str",
    ),
    ("jsonl", {"question": "1?", "answer": "$$"}, "its answer '[$][$]' is empty: nothing can be equal to it"),
    (
        "dapo_math",
        dapo_row(3) | {"solution": "\\boxed{}"},
        "its answer .* a box that is empty or does not close",
    ),
    (
        "jsonl",
        {"question": "1?", "answer": "so \\boxed{5"},
        "its answer .* a box that is empty or does not close",
    ),
    (
        "dapo_math",
        dapo_row(3) | {"solution": 600 * "x " + "\\boxed{1}"},
        "its answer is a text of 1209 characters",
    ),
    ("jsonl", {"question": "1?", "answer": 600 * "x "}, "its answer is a text of 1199 characters"),
    ("jsonl", {"question": "1?", "answer": "so #### "}, "field 'gold' is empty"),
    ("math500", {"problem": "1?", "answer": "1", "subject": 5}, "field 'subject' is int, not text"),
    ("mbpp", mbpp_row(601) | {"test_imports": [5]}, "field 'test_imports' is missing or not a list of texts"),
    ("mbpp", mbpp_row(601) | {"test_setup_code": 5}, "field 'test_setup_code' is int, not text"),
    ("mbpp", mbpp_row(601) | {"test_setup_code": "x = = 1"}, "test 1: .*invalid syntax"),
    ("deepcoder", deepcoder_row(1) | {"starter_code": 5}, "field 'starter_code' is int, not text"),
    (
        "deepcoder",
        deepcoder_row(1) | {"tests": '[{"fn_name": 5, "input": [1], "output": [2]}]'},
        "test 1 has int where the name of a function should be",
    ),
    (
        "deepcoder",
        deepcoder_row(1) | {"tests": '[{"fn_name": ["f"], "input": [1], "output": [2]}]'},
        "test 1 has list where the name of a function should be",
    ),
    (
        "deepcoder",
        deepcoder_row(1) | {"tests": '[{"input": [1], "output": [2]}]', "metadata": {"func_name": 5}},
        "test 1 has int where the name of a function should be",
    ),
    (
        "humaneval",
        helper_row() | {"prompt": "def find_zero(xs):\n"},
        "test 1: its code uses poly, which nothing defines",
    ),
    ("humaneval", helper_row() | {"prompt": "def (\n\ndef find_zero(xs):\n"}, "test 1: "),
]
GOOD = {
    "dapo_math": dapo_row,
    "gsm8k": lambda i: {"question": f"{i}?", "answer": f"so #### {i}"},
    "math500": lambda i: {"problem": f"{i}?", "answer": str(i), "level": 1},
    "aime25": lambda i: {"problem": f"{i}?", "answer": i},
    "deepcoder": deepcoder_row,
    "mbpp": lambda i: mbpp_row(602 + i),
    "humaneval": humaneval_row,
    "jsonl": lambda i: {"question": f"{i}?", "answer": str(i)},
}


@pytest.mark.parametrize("name, row, message", BROKEN_ROWS)
def test_a_broken_row_is_refused_with_file_and_row_number(name, row, message, tmp_path):
    rows = [GOOD[name](i) for i in range(6)]
    path = jsonl(tmp_path / "data" / "rows.jsonl", [*rows[:4], row, *rows[4:]])
    refuse(tmp_path, name, f"{path}, row 5: .*{message}", split="test")


@pytest.mark.parametrize("name, row, message", BROKEN_ROWS)
def test_a_broken_row_is_skipped_and_counted_when_told_so(name, row, message, tmp_path):
    rows = [GOOD[name](i) for i in range(1100 if name == "deepcoder" else 30)]
    jsonl(tmp_path / "data" / "rows.jsonl", [*rows[:4], row, *rows[4:]])
    split = "test" if name in ("math500", "aime25", "humaneval") else "train"
    tasks = load(name, tmp_path / "data", split, bad_rows="skip", cache=tmp_path / "cache")
    assert tasks.skipped == 1 and len(list(tasks)) == len(tasks)
    assert f"{name}/{split}/4" not in {task.id for task in tasks}


def test_a_skipped_row_moves_no_other_row_to_another_split(tmp_path):
    rows = [dapo_row(i) for i in range(100)]
    jsonl(tmp_path / "whole" / "train.jsonl", rows)
    jsonl(
        tmp_path / "broken" / "train.jsonl",
        [{} if i in (7, 50, 51, 99) else row for i, row in enumerate(rows)],
    )
    gone = {f"dapo_math/train/{i}" for i in (7, 50, 51, 99)}
    for split in ("train", "val", "test"):
        whole = list(load("dapo_math", tmp_path / "whole", split, cache=tmp_path / "cache"))
        broken = load("dapo_math", tmp_path / "broken", split, bad_rows="skip", cache=tmp_path / "cache")
        assert list(broken) == [task for task in whole if task.id not in gone]
        assert broken.skipped == 4


def test_a_test_file_of_its_own_is_read_for_test_alone_and_nothing_else_is(tmp_path):
    rows = [{"question": f"{i}?", "gold": str(i)} for i in range(20)]
    jsonl(tmp_path / "data" / "train.jsonl", rows)
    file = tmp_path / "data" / "test.jsonl"
    file.write_text("broken\n")
    both = [load("jsonl", tmp_path / "data", split, cache=tmp_path / "cache") for split in ("train", "val")]
    refuse(tmp_path, "jsonl", f"{file}, line 1: not JSON", split="test")
    assert [len(tasks) for tasks in both] == [18, 2]
    jsonl(file, rows[:3])
    assert load("jsonl", tmp_path / "data", "train", cache=tmp_path / "cache").digest == both[0].digest
    (tmp_path / "data" / "train.jsonl").write_text("broken\n")
    assert len(load("jsonl", tmp_path / "data", "test", cache=tmp_path / "cache")) == 3


def test_rows_of_a_parquet_file_are_counted_too(tmp_path):
    rows = [dapo_row(i) for i in range(10)]
    path = parquet(
        tmp_path / "data" / "en" / "train-00000-of-00001.parquet", [*rows, dapo_row(10) | {"solution": ""}]
    )
    refuse(tmp_path, "dapo_math", f"{path}, row 11: field 'solution' is empty")


def test_a_short_float_of_a_parquet_file_is_the_number_that_was_written(tmp_path):
    table = pa.table({"question": ["1?", "2?"], "answer": pa.array([0.1, None], pa.float32())})
    pq.write_table(table, tmp_path / "test.parquet")
    (task,) = load("jsonl", tmp_path, "test", bad_rows="skip", cache=tmp_path / "cache")
    assert task.gold == "0.1"


def test_bytes_where_text_should_be_are_a_broken_row_of_a_parquet_file(tmp_path):
    math = [{"problem": "1?", "answer": "1", "level": 1, "subject": b"Algebra"}]
    path = parquet(tmp_path / "data" / "test.parquet", math)
    refuse(tmp_path, "math500", f"{path}, row 1: field 'subject' is bytes, not text", split="test")
    code = [{"prompt": "1?", "tests": [{"call": "f", "args": [b"1"], "expected": 1}]}]
    path = parquet(tmp_path / "data" / "test.parquet", code)
    refuse(
        tmp_path,
        "jsonl",
        f"{path}, row 1: its level, meta or tests cannot be written as JSON: .*bytes",
        split="test",
    )


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


LINE = b'{"question": "1?", "answer": "1"}\n'


@pytest.mark.parametrize(
    "file, data, message",
    [
        ("train.parquet", b"PAR1 but not really", "not a readable parquet file"),
        ("train.parquet", b"", "not a readable parquet file"),
        ("train.jsonl", 2 * LINE + b'{"question": "1', "line 3: not JSON"),
        ("train.jsonl", LINE + b"\n" + b'{"question": "caf\xe9"}\n', "line 3: not UTF-8 .byte 17 is 0xe9"),
        ("train.jsonl.gz", b"\x1f\x8b\x08\x00 broken", "cannot be read past line 0"),
        ("train.json", b'{"question": "1?"}', "holds one JSON dict, not a list of rows"),
        ("train.json", b"[" * 100_000, "not JSON that can be read"),
        ("train.jsonl", b'{"question": "1?", "answer": ' + b"9" * 5000 + b"}\n", "line 1: not JSON .*digits"),
        ("train.json", LINE + LINE, "not JSON .Extra data at column 1.: JSON lines need a .jsonl name"),
        ("train.jsonl", b"[\n" + LINE + b"]", "JSON list over several lines needs a .json name"),
        ("train.json", b"[]", "no rows here"),
        ("train.jsonl", LINE.decode().encode("utf-16"), "line 1: not UTF-8 .byte 0 is 0xff"),
        ("train.jsonl.gz", gzip.compress(30 * LINE, mtime=0)[:-9], "cannot be read past line"),
        ("train.jsonl", b"", "no rows here"),
        ("train.jsonl", b"\n\n", "no rows here"),
        ("notes.txt", LINE, "no data files here .looked for .parquet"),
        (".train.jsonl", LINE, "no data files here"),
    ],
)
def test_an_unreadable_or_empty_file_is_one_clear_line(file, data, message, tmp_path):
    path = write(tmp_path / "data" / file, data)
    said = refuse(tmp_path, "jsonl", message)
    assert "no data files" in said or str(path) in said


SPLITS = ("train", "val", "test")


@pytest.mark.parametrize(
    "file, data",
    [
        ("train.jsonl", b"\xef\xbb\xbf" + 30 * LINE),
        ("train.jsonl", (30 * LINE).replace(b"\n", b"\r\n")),
        ("train.jsonl", 29 * LINE + b"\n  \n" + LINE.rstrip()),
        ("train.jsonl.gz", gzip.compress(30 * LINE, mtime=0)),
        ("train.jsonl", gzip.compress(30 * LINE, mtime=0)),
        ("train.jsonl.gz", 30 * LINE),
        ("train.json", b"\xef\xbb\xbf[" + b",".join(30 * [LINE]) + b"]"),
        ("data/train.jsonl", 30 * LINE),
    ],
)
def test_files_as_people_have_them_are_read(file, data, tmp_path):
    write(tmp_path / "data" / file, data)
    write(tmp_path / "data" / "._train.jsonl", b"what a Mac leaves beside a file")
    parts = [load("jsonl", tmp_path / "data", split, cache=tmp_path / "cache") for split in SPLITS]
    assert sum(map(len, parts)) == 30


@pytest.mark.parametrize(
    "train, test",
    [
        *(("train.jsonl", "test.jsonl.gz"), ("train.jsonl", "test.json"), ("train.parquet", "test.jsonl")),
        *(
            ("training.jsonl", "testing.jsonl"),
            ("my_train.jsonl", "eval.jsonl"),
            ("trainset.jsonl", "testset.jsonl"),
            ("math_traindata.jsonl", "math_testdata.jsonl"),
            ("train.jsonl", "evaluation.json"),
        ),
    ],
)
def test_every_file_whose_name_states_a_split_is_read(train, test, tmp_path):
    for name, count in ((train, 30), (test, 3)):
        rows = b"[" + b",".join(count * [LINE]) + b"]" if name.endswith(".json") else count * LINE
        path = write(tmp_path / "data" / name, rows)
        if name.endswith(".parquet"):
            parquet(path, count * [json.loads(LINE)])
    write(tmp_path / "data" / "about.json", b"{}")
    settings = {"val_size": 0, "cache": tmp_path / "cache"}
    parts = [load("jsonl", tmp_path / "data", split, **settings) for split in ("train", "test")]
    assert [len(tasks) for tasks in parts] == [30, 3]


@pytest.mark.parametrize(
    "files",
    [
        ("train.jsonl", "train.jsonl.gz", "train-2.json", "train_stats.json"),
        ("train.jsonl", "train.json", "test_results.json", "eval_config.json"),
        ("a.jsonl", "a.json"),
        ("my_eval.jsonl",),
    ],
)
def test_copies_and_descriptions_beside_the_data_are_not_read(files, tmp_path):
    """A file alone is trained on."""
    for name in files:
        data = 30 * LINE if name == files[0] else b"not read"
        write(tmp_path / "data" / name, data)
    parts = [load("jsonl", tmp_path / "data", split, cache=tmp_path / "cache") for split in SPLITS]
    assert sum(map(len, parts)) == 30


def test_files_of_the_directory_itself_come_before_those_of_a_folder_in_it(tmp_path):
    for name in ("train.jsonl", "data/raw.jsonl"):
        jsonl(tmp_path / "data" / name, [{"question": f"{name} {i}?", "answer": "1"} for i in range(20)])
    tasks = load("jsonl", tmp_path / "data", cache=tmp_path / "cache")
    assert all(task.question.startswith("train.jsonl") for task in tasks)


def test_a_directory_that_cannot_be_looked_into_is_told(tmp_path):
    with pytest.raises(DataError, match=r"cannot be read .File name too long"):
        load("jsonl", tmp_path / ("x" * 300), cache=tmp_path / "cache")


def test_a_file_of_another_kind_is_refused_by_its_name(tmp_path):
    path = write(tmp_path / "rows.csv", b"question,answer\n1?,1\n")
    with pytest.raises(DataError, match=f"{path}: not a data file .its name must end in .parquet"):
        load("jsonl", path, cache=tmp_path / "cache")


ODD_ANSWERS = [
    *((6.02e23, "6.02e+23"), (1e23, "1e+23"), (1e15, "1" + 15 * "0"), (1e-7, "1e-07")),
    *((10**4000, "1" + 4000 * "0"), (0.5, "0.5"), (2.0, "2"), (-0.0, "0"), (" 7 ", "7"), ("٣", "٣")),
    *(("He has 3+4 = 7.\n#### 1,007", "1,007"), (600 * "x " + r"so $\boxed{\frac12}$.", r"\frac12")),
    (r"We have $x=1/2$ so $\boxed{\frac12}$.", r"\frac12"),
]


@pytest.mark.parametrize("answer, gold", ODD_ANSWERS, ids=lambda value: str(value)[:8])
def test_answers_in_odd_forms(answer, gold, tmp_path):
    jsonl(tmp_path / "test.jsonl", [{"question": "1?", "answer": answer}])
    (task,) = load("jsonl", tmp_path, "test", cache=tmp_path / "cache")
    assert task.gold == gold


@pytest.mark.parametrize(
    "tests, found",
    [
        ("assert f(1) == 2", {"call": "f", "args": [1], "expected": 2}),
        ('[{"stdin": "1", "stdout": "2"}]', {"stdin": "1", "stdout": "2"}),
        ('{"inputs": ["1"], "outputs": ["2"]}', {"stdin": "1", "stdout": "2"}),
        ('["assert f(1) == 2"]', {"call": "f", "args": [1], "expected": 2}),
        (['{"stdin": "1", "stdout": "2"}'], {"stdin": "1", "stdout": "2"}),
        ('[{"check": "assert f(1)", "setup": "x = 1"}]', {"check": "assert f(1)", "setup": "x = 1"}),
    ],
)
def test_tests_may_come_as_text(tests, found, tmp_path):
    jsonl(tmp_path / "test.jsonl", [{"prompt": "Write f.", "tests": tests}])
    (task,) = load("jsonl", tmp_path, "test", cache=tmp_path / "cache")
    assert task.tests == (found,)


def test_a_mixed_parquet_file_has_null_where_a_row_has_no_such_field(tmp_path):
    rows = [
        {"question": "1?", "answer": "1", "tests": None},
        {"question": "f?", "answer": None, "tests": ["assert f()"]},
    ]
    parquet(tmp_path / "test.parquet", rows)
    math, code = load("jsonl", tmp_path, "test", cache=tmp_path / "cache")
    assert (math.family, math.gold, code.family) == ("math", "1", "code")


def test_a_mixed_parquet_file_has_null_where_a_test_is_of_another_form(tmp_path):
    tests = (
        *({"stdin": "1", "stdout": "2"}, {"call": "f", "args": [1], "expected": 2}, {"check": "assert f(1)"}),
        *({"call": "f", "args": [1], "expected": None}, {"call": "f", "args": [], "expected": 2}),
    )
    parquet(tmp_path / "test.parquet", [{"question": "f?", "tests": [test]} for test in tests])
    loaded = load("jsonl", tmp_path, "test", cache=tmp_path / "cache")
    assert [task.tests for task in loaded] == [(test,) for test in tests]


def test_a_truncated_parquet_file_is_one_clear_line(tmp_path):
    whole = parquet(tmp_path / "whole.parquet", [dapo_row(i) for i in range(50)]).read_bytes()
    path = write(tmp_path / "data" / "train.parquet", whole[: len(whole) // 2])
    refuse(tmp_path, "dapo_math", f"{path}: not a readable parquet file")


def test_a_file_that_breaks_off_is_no_data_set_even_when_rows_may_be_skipped(tmp_path):
    write(tmp_path / "data" / "train.jsonl", 30 * LINE + b'{"question": "1')
    refuse(tmp_path, "jsonl", "line 31: not JSON", bad_rows="skip")
    assert not list((tmp_path / "cache").rglob("*.array_record*")), "half a data set was left behind"


def test_a_line_that_is_no_json_is_skipped_like_any_broken_row_and_the_number_is_told(tmp_path, caplog):
    path = write(
        tmp_path / "data" / "train.jsonl",
        20 * LINE + b'{"question": "1\n' + b"caf\xe9\n" + b'{"question": "1?"}\n' + 20 * LINE,
    )
    refuse(tmp_path, "jsonl", f"{path}, line 21: not JSON")
    settings = {"bad_rows": "skip", "cache": tmp_path / "cache", "val_size": 0}
    for _ in range(2):  # prepared, and read from the cache
        caplog.clear()
        parts = [load("jsonl", tmp_path / "data", split, **settings) for split in ("train", "test")]
        assert sum(map(len, parts)) == 40 and parts[0].skipped == 3
        said = [record.getMessage() for record in caplog.records]
        own = [re.match(r"jsonl: (\d) of the \d+ rows of \w+ are broken and skipped;", text) for text in said]
        assert sum(int(found[1]) for found in own if found) == 3
        for text, found in zip(said, own):
            first = f"the first that was read: {path}, line 21: not JSON (Invalid control"
            assert first in text if found else text == "jsonl: 3 rows of other splits are broken and skipped"


def test_rows_of_another_family_are_broken_rows(tmp_path):
    code = {"question": "f?", "tests": ["assert f(1) == 2"]}
    path = jsonl(tmp_path / "data" / "train.jsonl", [*[json.loads(LINE)] * 20, code])
    refuse(tmp_path, "jsonl", f"{path}, row 21: has the family 'code', and 'math' is required", family="math")
    settings = {"bad_rows": "skip", "cache": tmp_path / "cache"}
    assert load("jsonl", tmp_path / "data", family="math", **settings).skipped == 1
    assert load("jsonl", tmp_path / "data", **settings).skipped == 0


def test_rows_that_are_all_broken_are_no_data_set(tmp_path):
    jsonl(tmp_path / "data" / "train.jsonl", [{"question": "?"}] * 3)
    refuse(tmp_path, "jsonl", "'train' has 3 rows, none of them usable: .*row 1: field", bad_rows="skip")


@pytest.mark.parametrize("where", ["files", "lists"])
def test_problems_that_two_splits_share_are_found(where, tmp_path):
    train, test = [f"{i}?" for i in range(20)], ["20?", "3?", " 4?", "21?"]
    if where == "files":
        for split, questions in (("train", train), ("test", test)):
            rows = [{"question": question, "answer": "1"} for question in questions]
            jsonl(tmp_path / "data" / f"{split}.jsonl", rows)
        parts = [
            load("jsonl", tmp_path / "data", split, cache=tmp_path / "cache", val_size=0)
            for split in ("test", "train")
        ]
        assert shared(*parts) == [1, 2]
        assert shared(list(parts[0]), parts[1]) == [1, 2]
    else:
        tests = [Task(f"test/{i}", "math", question, gold="1") for i, question in enumerate(test)]
        trains = [Task(f"train/{i}", "math", question, gold="1") for i, question in enumerate(train)]
        assert shared(tests, trains) == [1, 2]
        one_more = replace(SUM, id="train/7")  # ids may begin anew in each split
        assert shared([*tests, one_more], trains) == [1, 2]


# ---------------------------------------------------------------- tasks of one's own

SUM, CODE = Task("a", "math", "1+1=?", gold="2"), ({"stdin": "1", "stdout": "2"},)
BROKEN_TASKS = [
    ({"question": "1+1=?"}, "is dict, not a marl_jax.tasks.Task"),
    (replace(SUM, id=5), "field 'id' is int, not text"),
    (replace(SUM, id="t1"), "has the id of task 1: give each its own"),
    (replace(SUM, question=None), "field 'question' is NoneType, not text"),
    (replace(SUM, question=" "), "field 'question' is empty"),
    (replace(SUM, family="code", tests=CODE), "has the family 'code', and 'math' is required"),
    (replace(SUM, family="maths"), "has the family 'maths', and 'math' is required"),
    (replace(SUM, gold=2), "field 'gold' is int, not text"),
    (replace(SUM, gold=""), "field 'gold' is empty"),
    (
        replace(SUM, gold="She sold 48 clips in April and 24 in May. The answer is 72."),
        "its answer is a text of 59 characters",
    ),
    (replace(SUM, gold="$$"), "its answer '$$' is empty: nothing can be equal to it"),
    (replace(SUM, meta=None), "field 'meta' is NoneType, not a dict"),
    (
        replace(SUM, meta={"set": {1}}),
        "its level, meta or tests cannot be written as JSON: Object of type set",
    ),
    (replace(SUM, meta={1: 2}), "its meta or tests have a dict with keys that are no texts"),
]
BROKEN_TESTS = [
    ((), "its tests cannot be run: no tests"),
    (None, "its tests cannot be run: tests is NoneType, expected a list of tests"),
    (({"input": "1", "output": "2"},), "its tests cannot be run: test 1 has the keys ['input', 'output']"),
    (({"stdin": 1, "stdout": "2"},), "its tests cannot be run: test 1: stdin is int, expected str"),
]


def refuse_tasks(tasks, family, message):
    with pytest.raises(DataError) as error:
        check_tasks(tasks, "own:data", "val", family)
    assert "\n" not in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize("task, message", BROKEN_TASKS)
def test_a_broken_task_of_ones_own_is_named_by_place_and_id(task, message):
    tasks = [replace(SUM, id=f"t{i}") for i in range(3)] + [task]
    named = f"task 3 (id {task.id!r}): {message}" if isinstance(task, Task) else f"task 3: {message}"
    refuse_tasks(tasks, "math", f"'own:data', val: 1 of its 4 tasks cannot be used (counted from 0): {named}")


def test_a_gold_answer_may_stand_in_a_box():
    sound = replace(SUM, gold=r"So it is $\boxed{2}$.")
    assert check_tasks([sound], "own:data", "val", "math") == [sound]


@pytest.mark.parametrize("tests, message", BROKEN_TESTS)
def test_a_code_task_of_ones_own_needs_tests_that_can_be_run(tests, message):
    sound = Task("t0", "code", "Print 2.", tests=CODE)
    assert check_tasks(iter([sound]), "own:data", "val", "code") == [sound]
    refuse_tasks([sound, replace(sound, id="b", tests=tests)], "code", f"task 1 (id 'b'): {message}")
    if tests:  # that a role may be shown
        refuse_tasks([replace(sound, public_tests=tests)], "code", f"task 0 (id 't0'): {message}")


def test_what_is_there_must_be_sound_where_a_reward_needs_no_answers_or_tests():
    """Answers are compared and programs run before a reward of one's own sees them."""
    bare = [Task("t0", "math", "1+1=?"), Task("t0", "code", "Print 2.")]
    for task in bare:
        assert check_tasks([task], "own:data", "val", task.family, graded=False) == [task]
    with pytest.raises(DataError, match="field 'gold' is int, not text"):
        check_tasks([replace(bare[0], gold=2)], "own:data", "val", "math", graded=False)
    with pytest.raises(DataError, match="its tests cannot be run: test 1 has the keys"):
        check_tasks([replace(bare[1], tests=({"mine": 1},))], "own:data", "val", "code", graded=False)


def test_of_many_broken_tasks_the_first_are_told_and_the_rest_counted():
    refuse_tasks([replace(SUM, id=f"t{i}", gold="") for i in range(9)], "math", "; and 6 more")
    refuse_tasks(None, "math", "task 0: is NoneType, not a marl_jax.tasks.Task")


@pytest.mark.parametrize(
    "name, message",
    [
        ("gsm8", "unknown data set 'gsm8': did you mean 'gsm8k'\\? There are .*dapo_math"),
        ("micro-math", "did you mean 'micro_math'"),
        ("MATH500", "did you mean 'math500'"),
        ("zzz", "unknown data set 'zzz'. There are"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(name, message, tmp_path):
    refuse(tmp_path, name, message)


def test_settings_that_cannot_be_are_refused(tmp_path):
    jsonl(tmp_path / "data" / "train.jsonl", [json.loads(LINE)] * 30)
    refuse(tmp_path, "jsonl", "unknown split 'valid': there are train, val and test", split="valid")
    refuse(tmp_path, "jsonl", "bad_rows is 'ignore'; it must be 'refuse' or 'skip'", bad_rows="ignore")
    refuse(tmp_path, "jsonl", "cannot carve 27 val rows.*: lower data.val_size", val_size=27)
    refuse(tmp_path, "jsonl", "cannot carve -1 val rows.*: data.val_size counts rows", val_size=-1)
    refuse(tmp_path, "deepcoder", "data.*row 1: field 'tests' is NoneType")
    refuse(tmp_path, "micro_math", "levels 1, 2, 3, 4, 5, not .7", levels=(7,))
    refuse(tmp_path, "micro_code", "size is 0", size=0)
    with pytest.raises(DataError, match="nowhere: no such directory"):
        load("gsm8k", tmp_path / "nowhere", cache=tmp_path / "cache")
    with pytest.raises(DataError, match="jsonl: give the directory of its files"):
        load("jsonl", cache=tmp_path / "cache")


@pytest.mark.long
@pytest.mark.parametrize("size", [13_000, 10**9])  # without trying so often
def test_more_problems_than_there_are_are_refused(tmp_path, size):
    few = f"have too few different problems for {size}: lower data.train_size"
    refuse(tmp_path, "micro_math", few, levels=(1,), size=size)


def test_too_few_rows_for_the_published_split_are_refused(tmp_path):
    jsonl(tmp_path / "data" / "train.jsonl", [deepcoder_row(i) for i in range(1000)])
    refuse(tmp_path, "deepcoder", "cannot hold out 1000 test rows of 1000")


def test_a_cache_that_cannot_be_written_is_told_with_the_way_to_another(tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    refuse(
        tmp_path, "micro_math", r"tasks cannot be prepared in '.*' \(Not a directory\).*MARL_JAX_CACHE=DIR"
    )


@pytest.mark.parametrize(
    ("words", "kind"), [("Failed to write: No space left on device", DataError), ("a bug", RuntimeError)]
)
def test_a_disk_that_is_full_while_tasks_are_prepared_is_told(tmp_path, monkeypatch, words, kind):
    def fails(*_, **__):
        raise RuntimeError(words)

    monkeypatch.setattr(builders.TaskBuilder, "download_and_prepare", fails)
    with pytest.raises(kind, match=words):
        load("micro_math", split="test", cache=tmp_path / "cache")


def test_threads_that_load_at_once_leave_the_output_of_their_process_alone(tmp_path):
    rows = jsonl(tmp_path / "train.jsonl", [{"question": f"{i}?", "answer": str(i)} for i in range(60)])
    streams = sys.stdout, sys.stderr
    get = lambda i: len(load("jsonl", rows, seed=i, cache=tmp_path / f"cache-{i % 2}"))
    try:
        with ThreadPoolExecutor(6) as threads:
            assert [*threads.map(get, range(6))] == 6 * [49]
        assert (sys.stdout, sys.stderr) == streams
    finally:
        sys.stdout, sys.stderr = streams


def test_a_parquet_text_that_is_not_utf8_is_told(tmp_path):
    offsets = pa.py_buffer(np.array([0, 2], np.int32).tobytes())
    broken = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(b"\xff\xfe")])
    pq.write_table(pa.table({"question": broken, "answer": ["1"]}), tmp_path / "test.parquet")
    with pytest.raises(DataError, match=r"not a readable parquet file .*ff"):
        load("jsonl", tmp_path, "test", cache=tmp_path / "cache")


@pytest.mark.parametrize("name", ["metadata.json", "dataset_info.json", "*.array_record*"])
def test_prepared_data_that_lost_a_file_is_told_with_the_folder_to_remove(tmp_path, name):
    """As where old files of a cache are cleared away one by one."""
    jsonl(tmp_path / "data" / "test.jsonl", [{"question": "1+1=?", "gold": "2"}])
    opened = functools.partial(load, "jsonl", tmp_path / "data", "test", cache=tmp_path / "cache")
    assert opened()[0].gold == "2"
    (home,) = (tmp_path / "cache" / "jsonl").iterdir()
    (file,) = home.rglob(name)
    whole = file.read_bytes()
    for part in (whole[: len(whole) // 2], None):
        file.unlink()
        if part is not None:
            file.write_bytes(part)
        with pytest.raises(DataError, match=f"in '{home}' is damaged .*: remove that folder"):
            opened()[0]
    shutil.rmtree(home)
    assert opened()[0].gold == "2"
