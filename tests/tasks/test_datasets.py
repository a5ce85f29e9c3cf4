"""Every data set by name: small files in its published schema in, tasks out."""

import dataclasses
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from published import WRITERS, dapo_row, humaneval_row, jsonl, mbpp_row

from marl_jax.rewards import run_program
from marl_jax.task import Task
from marl_jax.tasks import builders, datasets, micro, schemas
from marl_jax.tasks.datasets import NAMES, SOURCES, load
from marl_jax.tasks.row_files import DataError

FAMILY = {name: source.family for name, source in SOURCES.items()} | {
    "micro_math": "math",
    "micro_code": "code",
}
SPLITS = {
    "dapo_math": {"train": 49, "val": 5, "test": 6},
    "deepcoder": {"train": 18, "val": 2, "test": 1000},
    "gsm8k": {"train": 36, "val": 4, "test": 10},
    "math500": {"test": 10},
    "aime24": {"test": 30},
    "aime25": {"test": 30},
    "mbpp": {"train": 39, "val": 6, "test": 5},
    "humaneval": {"test": 5},
    "jsonl": {"train": 33, "val": 3, "test": 4},
    "micro_math": {"train": 60, "val": 20, "test": 20},
    "micro_code": {"train": 60, "val": 20, "test": 20},
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def open_set(tmp_path_factory, cache):
    """load(name, split) of the small files of a data set."""
    written = {}

    def open_set(name, split, **settings):
        if name in micro.KINDS:
            return load(name, split=split, size=SPLITS[name][split], cache=cache, **settings)
        if name not in written:
            written[name] = tmp_path_factory.mktemp(name)
            WRITERS[name](written[name])
        return load(name, written[name], split, cache=cache, **settings)

    return open_set


@pytest.mark.parametrize("name", NAMES)
def test_every_data_set_gives_sound_tasks_in_disjoint_splits(name, open_set):
    seen = set()
    for split, size in SPLITS[name].items():
        tasks = open_set(name, split)
        assert len(tasks) == len(list(tasks)) == size and tasks.name == name and tasks.split == split
        for task in tasks:
            assert task.id.startswith(f"{name}/") and task.id not in seen
            seen.add(task.id)
            assert task.family in ("math", "code") and task.family == (FAMILY[name] or task.family)
            assert isinstance(task.question, str) and task.question.strip()
            assert bool(task.gold) == (task.family == "math") and bool(task.tests) == (task.family == "code")
            plain = {"tests": list(task.tests), "public": list(task.public_tests), "meta": task.meta}
            assert json.loads(json.dumps(plain)) == plain
        assert tasks[-1] == list(tasks)[-1] and tasks[:2] == [tasks[0], tasks[1]]
        with pytest.raises(IndexError):
            tasks[size]


@pytest.mark.parametrize("name", ["math500", "aime24", "aime25", "humaneval"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_benchmark_has_no_split_to_train_on(name, split, open_set):
    with pytest.raises(DataError, match=f"{name} has no {split} split: it has test"):
        open_set(name, split)


def test_dapo_math_holds_the_english_rows_of_the_study_in_its_order(open_set):
    order = np.random.default_rng(42).permutation(60)
    test = open_set("dapo_math", "test")
    assert [task.id for task in test] == [f"dapo_math/train/{i}" for i in order[:6]]
    row = int(order[0])
    assert test[0] == Task(
        f"dapo_math/train/{row}",
        "math",
        f"What is {row} plus one?",
        gold=str(row + 1),
        meta={"source_id": f"uuid-{row}"},
    )
    rest = {f"dapo_math/train/{i}" for i in order[6:]}
    assert {task.id for split in ("train", "val") for task in open_set("dapo_math", split)} == rest


def test_without_val_train_is_all_that_is_not_test(open_set):
    order = np.random.default_rng(42).permutation(60)
    train = open_set("dapo_math", "train", val_size=0)
    assert [task.id for task in train] == [f"dapo_math/train/{i}" for i in order[6:]]
    with pytest.raises(DataError, match="dapo_math has no val split with val_size=0: set val_size"):
        open_set("dapo_math", "val", val_size=0)


def test_another_number_of_rows_than_the_studys_is_said(open_set, caplog):
    open_set("dapo_math", "test")
    assert "dapo_math has {'train': 60} rows, the study 14116" in caplog.text


def test_a_single_file_may_be_named(tmp_path, cache):
    path = jsonl(tmp_path / "mine.jsonl", [{"question": f"{i}?", "answer": str(i)} for i in range(20)])
    jsonl(tmp_path / "other.jsonl", [{"question": "other?", "answer": "1"}])
    assert len(load("jsonl", path, "test", cache=cache)) == 2


def test_prompts_that_still_carry_the_original_frame_lose_it(tmp_path, cache):
    rows = [dapo_row(i) for i in range(20)]
    jsonl(tmp_path / "train.jsonl", [row | {"prompt": row["source_prompt"][0]["content"]} for row in rows])
    questions = {task.question for task in load("dapo_math", tmp_path, cache=cache)}
    assert questions <= {row["prompt"] for row in rows}


def test_fields_as_copies_of_the_data_sets_have_them():
    for level, read in ((None, 0), ("Level ?", 0), ("Level 5", 5), (5.0, 5)):
        assert schemas.math500({"problem": "1?", "answer": "1", "level": level})["level"] == read
        assert schemas.generic({"problem": "1?", "answer": "1", "level": level})["level"] == read
    for level, read in ((-2, -2), ("3", 3), (True, 0), (2.5, 0), ("hard", 0), ([1], 0)):
        assert schemas.generic({"problem": "1?", "answer": "1", "level": level})["level"] == read
    original = dapo_row(1) | {"prompt": dapo_row(1)["source_prompt"]}
    del original["solution"]
    assert schemas.dapo_math(original) == schemas.dapo_math(dapo_row(1))
    numbers = {"problem": "Double it.", "tests": [{"input": 1, "output": 2}], "metadata": ""}
    assert schemas.deepcoder(numbers)["tests"] == ({"stdin": "1", "stdout": "2"},)
    indented = mbpp_row(11) | {"test_list": [" assert add(1) == 12"]}
    assert schemas.mbpp(indented)["tests"] == ({"call": "add", "args": [1], "expected": 12},)


def test_deepcoder_tests_become_those_of_run_program(open_set):
    order = np.random.default_rng(42).permutation(1020)
    test = open_set("deepcoder", "test")
    assert [task.id for task in test[:3]] == [f"deepcoder/train/{i}" for i in order[:3]]
    by_row = {int(task.id.rpartition("/")[2]): task for task in test}
    row = next(i for i in by_row if i % 2)
    assert by_row[row].tests[2] == {"stdin": "2\n", "stdout": f"{2 + row}\n"}
    row = next(i for i in by_row if not i % 2)
    assert by_row[row].tests[2] == {"call": "shift", "args": [2], "expected": 2 + row}


@pytest.mark.parametrize(
    "tests, expected",
    [
        (  # LiveCodeBench: one JSON value per line
            [
                {
                    "input": '[1, 2]\n"a"',
                    "output": "[2]",
                    "testtype": "functional",
                    "metadata": {"func_name": "go"},
                }
            ],
            {"call": "go", "args": [[1, 2], "a"], "expected": [2]},
        ),
        (  # JSON allows a line separator within a text
            [{"input": '"a\u2028b"\n', "output": "1", "testtype": "functional", "fn_name": "go"}],
            {"call": "go", "args": ["a\u2028b"], "expected": 1},
        ),
        ([{"input": "1", "output": "2", "testtype": "stdin"}], {"stdin": "1", "stdout": "2"}),
        ({"inputs": ["1"], "outputs": ["2"]}, {"stdin": "1", "stdout": "2"}),  # TACO
        ({"input": ["1"], "output": ["2"]}, {"stdin": "1", "stdout": "2"}),  # CodeContests
        (
            {"inputs": [[[1]]], "outputs": [[[1]]], "fn_name": "go"},
            {"call": "go", "args": [[1]], "expected": [1]},
        ),
        ([{"type": "stdin_stdout", "input": ["1", "2"], "output": ["3"]}], {"stdin": "1\n2", "stdout": "3"}),
    ],
)
def test_the_other_published_forms_of_tests_are_read_too(tests, expected, tmp_path, cache):
    jsonl(tmp_path / "test.jsonl", [{"problem": "Do it with go.", "tests": tests}])
    (task,) = load("jsonl", tmp_path, "test", cache=cache)
    assert task.tests == (expected,)


def test_the_order_of_a_dictionary_among_the_arguments_is_kept(tmp_path, cache):
    test = {"call": "first", "args": [{"b": 1, "a": 2}], "expected": "b"}
    jsonl(tmp_path / "test.jsonl", [{"prompt": "Write first(d).", "tests": [test]}])
    (task,) = load("jsonl", tmp_path, "test", cache=cache)
    assert list(task.tests[0]["args"][0]) == ["b", "a"]


def test_gsm8k_gold_is_the_number_after_the_mark(open_set):
    task = open_set("gsm8k", "test")[7]
    assert (task.gold, task.meta) == ("1007", {"solution": "It is <<1+1=2>>."})


def test_math500_and_aime_keep_level_and_published_id(open_set):
    assert (open_set("math500", "test")[3].level, open_set("math500", "test")[3].gold) == (
        4,
        "\\frac{\\pi}{2}",
    )
    assert open_set("math500", "test")[3].meta["source_id"] == "test/algebra/3.json"
    assert (open_set("aime24", "test")[5].gold, open_set("aime24", "test")[5].meta) == (
        "005",
        {"source_id": "65"},
    )
    assert open_set("aime25", "test")[15].question == "II 0"


def test_mbpp_is_split_by_task_number_whatever_the_file(open_set):
    numbers = {s: [int(t.meta["source_id"]) for t in open_set("mbpp", s)] for s in ("train", "val", "test")}
    assert numbers["test"] == [11, 12, 13, 509, 510] and numbers["val"] == [511, 512, 513, 514, 599, 600]
    assert numbers["train"] == list(range(601, 640))
    task = open_set("mbpp", "val")[4]
    assert (
        task.tests[1] == {"call": "add", "args": [1], "expected": 600} and task.public_tests == task.tests[:1]
    )
    assert task.question.endswith("assert add(0) == 599")


def test_a_function_of_mbpp_may_have_the_name_of_a_built_in(tmp_path, cache):
    """As task 126 has, whose solution is `def sum(a,b)`."""
    row = mbpp_row(126) | {
        "code": "def sum(a,b):\r\n  return 6",
        "test_list": ["assert sum(10,15) == 6", "assert sum((1,), 5) == 6"],
    }
    jsonl(tmp_path / "mbpp.jsonl", [row])
    (task,) = load("mbpp", tmp_path, "test", cache=cache)
    assert task.tests == (
        {"call": "sum", "args": [10, 15], "expected": 6},
        {"check": "assert sum((1,), 5) == 6", "functions": ["sum"]},  # JSON has no tuple
    )
    jsonl(tmp_path / "mbpp.jsonl", [row | {"code": "def total(a, b):\n  return 6"}])
    with pytest.raises(DataError, match="asserts nothing about the program"):
        load("mbpp", tmp_path, "test", cache=cache)


def test_the_original_dapo_rows_count_once(tmp_path, cache):
    """It has each problem about a hundred times: by rows, most of test and val would be train, too."""
    raw = [{name: dapo_row(i % 40)[name] for name in ("reward_model", "extra_info")} for i in range(200)]
    raw = [row | {"prompt": dapo_row(i % 40)["source_prompt"]} for i, row in enumerate(raw)]
    jsonl(tmp_path / "dapo-math-17k.jsonl", raw)
    splits = [load("dapo_math", tmp_path, split, cache=cache) for split in ("train", "val", "test")]
    questions = [task.question for split in splits for task in split]
    assert len(questions) == len({*questions}) == 40


def test_a_clone_of_humaneval_may_hold_its_examples(tmp_path, cache):
    jsonl(tmp_path / "data" / "HumanEval.jsonl.gz", [humaneval_row(i) for i in range(3)])
    jsonl(tmp_path / "data" / "example_problem.jsonl", [humaneval_row(7)])
    jsonl(tmp_path / "data" / "example_samples.jsonl", [{"task_id": "test/0", "completion": "x"}])
    assert [task.meta["source_id"] for task in load("humaneval", tmp_path, "test", cache=cache)] == [
        f"HumanEval/{i}" for i in range(3)
    ]


def test_asserts_whose_values_json_would_change_stay_code(tmp_path, cache):
    asserts = ["assert add((1, 2)) == 3", "assert add([1]) == (1, 2)", "assert set(add([1])) == {1}"]
    jsonl(tmp_path / "mbpp.jsonl", [mbpp_row(11) | {"test_list": asserts}])
    (task,) = load("mbpp", tmp_path, "test", cache=cache)
    assert task.tests[0] == {"check": asserts[0]}
    assert task.tests[1] == {"call": "add", "args": [[1]], "expected": [1, 2]}
    assert task.tests[2] == {"check": asserts[2]}


def test_humaneval_checks_become_calls_and_answers_may_rely_on_the_prompts_imports(open_set):
    task = open_set("humaneval", "test")[2]
    assert task.tests == (
        {"call": "total", "args": [[1, 2]], "expected": 5},
        {"call": "total", "args": [[]], "expected": 2},
    )
    assert task.meta == {"source_id": "HumanEval/2", "preamble": "from typing import List"}


def test_a_generic_file_may_mix_math_and_code(open_set):
    tasks = [task for split in ("train", "val", "test") for task in open_set("jsonl", split)]
    math = {task.gold for task in tasks if task.family == "math"}
    assert math == {str(i + 1) for i in range(20)}
    code = [task for task in tasks if task.family == "code"]
    assert len(code) == 20 and code[0].tests[1] == {"call": "inc", "args": [5], "expected": 6}


# The last two are those of CodeContests and TACO.
NO_TESTS = ("[]", [], None, {"input": [], "output": []}, {"inputs": [], "outputs": [], "fn_name": "f"})


def test_a_generic_row_may_say_more(tmp_path, cache):
    tests = {"tests": ["assert f(1) == 2"], "public_tests": ["assert f(2) == 3"]}
    rows = [
        {"question": "2?", "gold": "2", "level": 3, "meta": {"field": "algebra"}, "id": "x"},
        {"question": "f?", "level": "hard", **tests},
    ]
    jsonl(tmp_path / "test.jsonl", rows)
    code, math = sorted(load("jsonl", tmp_path, "test", cache=cache), key=lambda task: task.family)
    assert (math.level, math.meta) == (3, {"field": "algebra", "source_id": "x"})
    assert (code.level, code.tests, code.public_tests) == (
        0,
        ({"call": "f", "args": [1], "expected": 2},),
        ({"call": "f", "args": [2], "expected": 3},),
    )
    jsonl(tmp_path / "test.jsonl", [{**rows[1], "public_tests": none} for none in NO_TESTS])
    assert [task.public_tests for task in load("jsonl", tmp_path, "test", cache=cache)] == [()] * len(
        NO_TESTS
    )
    jsonl(tmp_path / "test.jsonl", [{**rows[1], "public_tests": 3}])
    with pytest.raises(DataError, match="field 'public_tests' is int, not a list of tests"):
        load("jsonl", tmp_path, "test", cache=cache)


def test_val_follows_the_seed_and_test_never_moves(open_set):
    ids = lambda split, **settings: [task.id for task in open_set("dapo_math", split, **settings)]
    assert ids("val", seed=1) == ids("val", seed=1) != ids("val", seed=2)
    assert ids("test", seed=1) == ids("test", seed=2)
    assert len(ids("val", val_size=20)) == 20 and len(ids("train", val_size=20)) == 34


def test_the_digest_is_of_the_content_not_of_the_file(tmp_path, cache):
    rows = [{"question": f"{i}?", "answer": str(i)} for i in range(20)]
    jsonl(tmp_path / "a" / "train.jsonl", rows)
    jsonl(tmp_path / "b" / "train.jsonl.gz", rows)
    jsonl(tmp_path / "c" / "train.jsonl", [*rows[:-1], rows[-1] | {"answer": "0"}])
    a, b, c = (load("jsonl", tmp_path / name, cache=cache).digest for name in "abc")
    assert a == b != c


def test_the_digest_is_of_the_rows_in_the_split(tmp_path, cache):
    """Runs on other validation problems are not compared problem by problem, and none goes on with other ones."""
    rows = [{"question": f"{i}?", "answer": str(i)} for i in range(20)]
    of = lambda split, **settings: load("jsonl", tmp_path, split, cache=cache, **settings).digest
    jsonl(tmp_path / "train.jsonl", rows)
    assert of("val", seed=1) != of("val", seed=2) and of("test", seed=1) == of("test", seed=2)
    alone = of("train")
    jsonl(tmp_path / "train.jsonl", [*rows, {"question": "no answer"}])  # another permutation, of equal tasks
    assert of("train", bad_rows="skip") != alone
    jsonl(tmp_path / "train.jsonl", rows)
    jsonl(tmp_path / "test.jsonl", rows[:1])  # and none is held out of train any more
    assert of("train") != alone


def test_prepared_data_is_reused_and_a_changed_file_is_read_anew(tmp_path, cache):
    jsonl(tmp_path / "test.jsonl", [{"question": "1?", "answer": "1"}])
    assert load("jsonl", tmp_path, "test", cache=cache)[0].gold == "1"
    prepared = set((cache / "jsonl").iterdir())
    assert load("jsonl", tmp_path, "test", cache=cache)[0].gold == "1"
    assert set((cache / "jsonl").iterdir()) == prepared
    jsonl(tmp_path / "test.jsonl", [{"question": "1?", "answer": "2"}])
    assert load("jsonl", tmp_path, "test", cache=cache)[0].gold == "2"


@pytest.mark.parametrize("file", ["tasks/schemas.py", "rewards/asserts.py", "rewards/sandbox/plain.py"])
def test_code_that_says_which_rows_are_broken_is_part_of_what_prepared_data_is_named_after(
    file, tmp_path, monkeypatch
):
    here = Path(datasets.__file__).parent
    for room in ("tasks", "rewards"):
        shutil.copytree(here.parent / room, tmp_path / room)
    monkeypatch.setattr(datasets, "__file__", str(tmp_path / "tasks" / "datasets.py"))
    before = datasets._key("the same")
    assert datasets._key("the same") == before != datasets._key("other")
    with open(tmp_path / file, "a") as code:
        code.write("\n# another rule\n")
    assert datasets._key("the same") != before


@pytest.mark.parametrize("bare", [None, [1, 2], 7, []])
def test_lists_of_one_are_the_wrapping_of_expected_values_unless_another_value_is_bare(bare):
    outputs = [[5], [[5]], [[1, 2]]] if bare is None else [[3], bare]
    tests = [{"type": "function_call", "fn_name": "f", "input": [0], "output": out} for out in outputs]
    tests += [{"testtype": "functional", "fn_name": "f", "input": "0", "output": "[3]"}]
    fields = schemas.deepcoder({"problem": "Write f.", "tests": json.dumps(tests)})
    expected = [5, [5], [1, 2]] if bare is None else outputs
    assert [test["expected"] for test in fields["tests"]] == [*expected, [3]]


def test_keys_of_dicts_are_the_integers_that_json_made_texts_of():
    integers = {
        "inputs": [[{"1": 2, "-3": 0}], [{}]],
        "outputs": [[{"2": 1, "0": -3}], [{}]],
        "fn_name": "swap",
    }
    fields = schemas.deepcoder({"problem": "Swap.", "tests": json.dumps(integers)})
    assert fields["question"].endswith("`swap`.") and fields["tests"][1]["args"] == [{}]
    answer = "class Solution:\n    def swap(self, d):\n        return {v: k for k, v in d.items()}"
    assert run_program(answer, fields["tests"]).passed
    assert not run_program(answer.replace("v: k", "k: v"), fields["tests"]).passed
    letters = {"inputs": [["a1"], ["1"]], "outputs": [[{"a": 1, "1": 1}], [{"1": 1}]], "fn_name": "count"}
    counts = schemas.deepcoder({"problem": "Count.", "tests": json.dumps(letters)})["tests"]
    assert [test["expected"] for test in counts] == [{"a": 1, "1": 1}, {"1": 1}]


@pytest.mark.parametrize(
    "problem, told",
    [
        *(
            ("Put in order.", False),
            ("Order the list; the order matters.", False),
            ("def orders(xs):", False),
        ),
        *(
            ("class Solution:\n    def order(self, xs):", True),
            ("Write `order`.", True),
            ("Write `order(xs)`.", True),
        ),
    ],
)
def test_the_name_of_the_function_is_told_where_the_problem_does_not(problem, told):
    tests = [{"fn_name": "order", "input": [[2, 1]], "output": [[1, 2]]}]
    fields = schemas.deepcoder({"problem": problem, "tests": tests})
    assert fields["question"] == problem + ("" if told else "\n\nWrite a function named `order`.")


@pytest.mark.long
def test_two_runs_that_prepare_the_same_data_at_once_do_not_disturb_each_other(tmp_path):
    program = (
        "from marl_jax.tasks import load\n"
        f"tasks = load('micro_math', size=3000, cache={str(tmp_path)!r})\n"
        "print(len(tasks), tasks.digest, tasks[2999].id)\n"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [run.communicate(timeout=300)[0] for run in runs]
    assert said[0] == said[1] and said[0].startswith("3000 ")
    assert len(list((tmp_path / "micro_math").iterdir())) == 1, "something was left behind"


def test_any_amount_of_data_is_written_without_tensorflow(tmp_path, monkeypatch):
    assert builders.shuffle.MAX_MEM_BUFFER_SIZE >= 1 << 40
    # That this bound is what keeps a large data set away from TensorFlow:
    monkeypatch.setattr(builders.shuffle, "MAX_MEM_BUFFER_SIZE", 10)
    with pytest.raises(ModuleNotFoundError, match="tensorflow"):
        load("micro_math", size=5, cache=tmp_path)
    assert not list((tmp_path / "micro_math").iterdir()), "half a data set was left behind"


def test_no_tensorflow_and_no_jax_at_run_time(tmp_path):
    jsonl(tmp_path / "train.jsonl", [{"question": f"{i}?", "answer": str(i)} for i in range(20)])
    program = (
        "import sys\n"
        "from marl_jax.tasks import load\n"
        "assert not {'tensorflow_datasets', 'pyarrow', 'sympy'} & set(sys.modules), 'heavy at import'\n"
        f"list(load('jsonl', {str(tmp_path)!r}, cache={str(tmp_path / 'cache')!r}))\n"
        f"list(load('micro_code', size=5, cache={str(tmp_path / 'cache')!r}))\n"
        "assert 'tensorflow_datasets' in sys.modules\n"
        "assert not {'tensorflow', 'jax', 'torch'} & set(sys.modules), sorted(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_without_a_directory_the_published_files_are_fetched(tmp_path, monkeypatch):
    jsonl(tmp_path / "www" / "train.jsonl", [dapo_row(i) for i in range(20)])

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    serve = lambda *args: Quiet(*args, directory=str(tmp_path / "www"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def publish(name):
            urls = {"train": (f"http://127.0.0.1:{server.server_port}/{name}",)}
            monkeypatch.setitem(SOURCES, "dapo_math", dataclasses.replace(SOURCES["dapo_math"], urls=urls))

        publish("train.jsonl")
        assert len(load("dapo_math", split="test", cache=tmp_path / "cache")) == 2
        page = tmp_path / "www" / "page.jsonl"  # of a proxy, with status 200
        page.write_text("<html>")
        publish("page.jsonl")
        with pytest.raises(
            DataError, match=r"downloads.* not JSON .*; remove the folder .* fetched"
        ) as error:
            load("dapo_math", split="test", cache=tmp_path / "cache")
        shutil.rmtree(str(error.value).split("'")[1])
        page.write_text((tmp_path / "www" / "train.jsonl").read_text())
        assert len(load("dapo_math", split="test", cache=tmp_path / "cache")) == 2
        publish("gone.jsonl")
        with pytest.raises(
            DataError, match=r"dapo_math: cannot be fetched .*gone.jsonl.*: give the directory"
        ) as error:
            load("dapo_math", split="test", cache=tmp_path / "cache")
        server.shutdown()
    assert "\n" not in str(error.value)
    with pytest.raises(DataError, match="cannot be fetched"):  # nobody listens any more
        load("dapo_math", split="test", cache=tmp_path / "cache")


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "jsonl"])
def test_every_published_set_knows_where_it_is_published(name):
    links = [link for links in SOURCES[name].urls.values() for link in links]
    assert links and all(link.startswith("https://") for link in links)
    assert len(set(links)) == len(links)


def test_loading_leaves_the_logging_of_its_user_alone(tmp_path):
    script = """
import logging, sys
from absl import logging as absl_logging
from marl_jax.tasks import load
load("micro_math", split="test", size=5, cache=sys.argv[1])
assert not logging.root.handlers, logging.root.handlers
absl_logging.warning("said by absl")
logging.warning("said by logging")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert [line.split(":")[-1] for line in done.stderr.splitlines()] == ["said by absl", "said by logging"]


def test_a_module_that_hides_a_package_of_the_data_sets_is_told(tmp_path):
    (tmp_path / "tree.py").write_text("")
    child = "from marl_jax.tasks import load\nload('micro_math', size=1)"
    done = subprocess.run(
        [sys.executable, "-c", child],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert f"'{tmp_path}/tree.py' hides the package 'tree' (dm-tree)" in done.stderr
