"""Schemas of published data sets: one function each, from a row as it is on disk to fields of `Task`.

A field that is missing, empty or of the wrong type raises a `RowError` that names it.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from marl_jax.task import text_fault
from marl_jax.tasks.row_files import Row, RowError

Fields = dict[str, Any]
Test = Mapping[str, Any]

_DAPO_HEAD = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
_DAPO_TAIL = '\n\nRemember to put your answer on its own line after "Answer:".'
_INTEGER = re.compile("0|-?[1-9][0-9]{0,17}")
_MAX_LEVEL = 2**31 - 1  # the largest level that can be stored
_LEVEL = re.compile(r"(?:Level )?(-?[0-9]{1,99})(?:\.0)?")
_NAMED = r"def {0}\b|[`'\"]{0}[`'\"(]"  # how a problem names the function to write
_QUESTION = ("question", "problem", "prompt", "text")
_ANSWER = ("gold", "answer", "final_answer", "solution")  # next to gold, the others may be worked solutions


def dapo_repeated(row: Row) -> str | None:
    """The problem of a row of the original data set, which has each problem about a hundred times."""
    prompt = row.get("prompt")
    return json.dumps(prompt) if isinstance(prompt, list) else None


def dapo_math(row: Row) -> Fields:
    """prompt, solution, data_source, source_prompt, ability, reward_model {ground_truth, style}, extra_info.

    In the original data set, the prompt is a list of one message, and the solution is only in the reward model.
    """
    extra, prompt, model = row.get("extra_info"), row.get("prompt"), row.get("reward_model")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], dict):
        row = {**row, "prompt": prompt[0].get("content")}
    if row.get("solution") is None and isinstance(model, dict):
        row = {**row, "solution": model.get("ground_truth")}
    return {
        "question": text(row, "prompt").removeprefix(_DAPO_HEAD).removesuffix(_DAPO_TAIL),
        "gold": text(row, "solution"),
        "meta": {"source_id": str(extra["index"])} if isinstance(extra, dict) and "index" in extra else {},
    }


def gsm8k(row: Row) -> Fields:
    """question, answer: a worked solution that ends in `#### 72`."""
    worked, marker, gold = text(row, "answer").rpartition("####")
    gold = gold.strip().replace(",", "")
    if not marker or not gold:
        raise RowError("field 'answer' does not end in '#### <number>'")
    return {"question": text(row, "question"), "gold": gold, "meta": {"solution": worked.strip()}}


def math500(row: Row) -> Fields:
    """problem, solution, answer, subject, level, unique_id."""
    level = _level(row)
    if level is None or not 0 <= level < 1000:
        raise RowError(f"field 'level' is {row['level']!r}, not a number from 0 to 999")
    subject = optional_text(row, "subject")
    return {
        "question": text(row, "problem"),
        "gold": text(row, "answer"),
        "level": level,
        "meta": _source_id(row, "unique_id") | ({"subject": subject} if subject else {}),
    }


def aime(row: Row) -> Fields:
    """problem or question (Problem in one copy), answer (Answer): text or an integer."""
    return {
        "question": text(row, "problem", "question", "Problem"),
        "gold": text(row, "answer", "Answer", number=True),
        "meta": _source_id(row, "id", "ID"),
    }


def deepcoder(row: Row) -> Fields:
    """problem, solutions, tests: a JSON text; starter_code and metadata in some of its subsets.

    A call's expected value is published inside a list of one: `[5]` is 5, `[[5]]` is [5]. A few rows publish values
    bare: if any value of a row is not a list of one, all values of the row are used unchanged. In JSON, integer keys of
    dicts became texts; if all keys of a row are such texts, they become integers again.
    """
    tests = row.get("tests")
    if isinstance(tests, str):
        tests = _from_json(tests, "field 'tests'")
    parsed = program_tests(tests, _function_name(row.get("metadata")))
    question = text(row, "problem")
    if starter := optional_text(row, "starter_code"):
        question += f"\n\nStart from this code:\n{starter}"
    name = parsed[0].get("call") or next(iter(parsed[0].get("functions", ())), None)
    if isinstance(name, str) and not re.search(_NAMED.format(re.escape(name)), question):
        question += f"\n\nWrite a function named `{name}`."
    return {"question": question, "tests": parsed}


def mbpp(row: Row) -> Fields:
    """task_id, text (prompt in the sanitized copy), code, test_list, test_setup_code or test_imports."""
    mbpp_split(row)
    asserts = [part.strip() for part in _strings(row, "test_list")]
    if not asserts:
        raise RowError("no tests: field 'test_list' is empty")
    imports = _strings(row, "test_imports") if row.get("test_imports") else ()
    setup = optional_text(row, "test_setup_code") or "\n".join(imports)
    question = f"{text(row, 'text', 'prompt')}\nYour code should satisfy this test:\n{asserts[0]}"
    tests = assertions(asserts, setup=setup, solution=optional_text(row, "code"))
    return {
        "question": question,
        "tests": tests,
        "public_tests": tests[:1],
        "meta": _source_id(row, "task_id"),
    }


def mbpp_split(row: Row) -> str:
    """The published assignment: 1-10 few-shot prompts, 11-510 test, 511-600 validation, 601-974 train."""
    number = row.get("task_id")
    if isinstance(number, bool) or not isinstance(number, int):
        raise RowError(f"field 'task_id' is {number!r}, not an integer")
    return "prompt" if number < 11 else "test" if number < 511 else "val" if number < 601 else "train"


def humaneval(row: Row) -> Fields:
    """task_id, prompt (signature and docstring), entry_point, canonical_solution, test: a `check(candidate)`."""
    prompt, entry = text(row, "prompt"), text(row, "entry_point")
    preamble = prompt.partition(f"def {entry}(")[0].rstrip()
    return {
        "question": prompt,
        # A check may use helpers of the prompt. It gets the published ones as setup, never those of the program.
        "tests": assertions([text(row, "test")], entry, preamble),
        # Put in front of answers, which may use the prompt's imports and helpers without repeating them.
        "meta": _source_id(row, "task_id") | {"preamble": preamble},
    }


def generic(row: Row) -> Fields:
    """A question under any common name with either `tests` (code) or an answer (math).

    In a worked solution, the answer is the text after `####`, or else in the last box. `tests` and `public_tests` are
    test code, a list of it, or a list of tests in any form that `program_tests` reads, also as JSON.
    """
    from marl_jax.rewards.math.boxed import extract_boxed

    meta, level = row.get("meta"), _level(row) or 0
    if abs(level) > _MAX_LEVEL:
        raise RowError(f"field 'level' is {level}; it must lie in -{_MAX_LEVEL} to {_MAX_LEVEL}")
    fields: Fields = {
        "question": text(row, *_QUESTION),
        "meta": (meta if isinstance(meta, dict) else {}) | _source_id(row, "id"),
        "level": level,
    }
    if row.get("tests") is not None:  # null in the math rows of a mixed parquet file
        public = _tests(row, "public_tests") if row.get("public_tests") else ()
        return fields | {"family": "code", "tests": _tests(row, "tests"), "public_tests": public}
    gold = text(row, *_ANSWER, number=True).rpartition("####")[2].strip()
    return fields | {"family": "math", "gold": extract_boxed(gold) or gold}


def _level(row: Row) -> int | None:
    """The level, an integer, "Level 5" or the 5.0 of a column with nulls; 0 if unknown, None if it is no integer."""
    if (level := row.get("level")) in (None, "?", "Level ?"):
        return 0
    match = _LEVEL.fullmatch(str(level))
    return int(match[1]) if match else None


def _tests(row: Row, name: str) -> tuple[Test, ...]:
    tests = row[name]
    try:
        if isinstance(tests, str):
            tests = _from_json(tests, "field 'tests'") if tests.lstrip()[:1] in ("[", "{") else [tests]
        if name == "public_tests":
            named = tests if isinstance(tests, dict) else {"": tests}
            if not any(part for key, part in named.items() if key != "fn_name"):
                return ()
        if isinstance(tests, list) and tests and all(isinstance(test, str) for test in tests):
            if all(test.lstrip().startswith("{") for test in tests):  # one JSON object a text
                return program_tests([_from_json(test, "field 'tests'") for test in tests], None)
            return assertions(tests, setup=optional_text(row, "setup"))
        return program_tests(tests, None)
    except RowError as error:
        raise RowError(str(error).replace("field 'tests'", f"field '{name}'")) from None


def program_tests(tests: Any, function: str | None) -> tuple[Test, ...]:
    """Tests in primeintellect, LiveCodeBench, TACO, CodeContests or this library's form, as tests of `run_program`."""
    if isinstance(tests, dict) and {"inputs", "input"} & tests.keys():  # columns, of TACO or CodeContests
        inputs, outputs = (tests.get(f"{side}s", tests.get(side)) for side in ("input", "output"))
        if not (isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs)):
            raise RowError("field 'tests' has inputs and outputs that are not two lists of one length")
        name = tests.get("fn_name")
        tests = [{"input": i, "output": o, "fn_name": name} for i, o in zip(inputs, outputs)]
    if not isinstance(tests, list):
        raise RowError(f"field 'tests' is {type(tests).__name__}, not a list of tests")
    if not tests:
        raise RowError("no tests: field 'tests' is empty")
    calls = [
        number
        for number, test in enumerate(tests)
        if isinstance(test, dict) and _form(test, function)[0] == "function_call"
    ]
    outputs = [tests[number].get("output") for number in calls]
    wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
    result = [_program_test(number, test, function, wrapped) for number, test in enumerate(tests, start=1)]
    published = [number for number in calls if tests[number].get("call") is None and "call" in result[number]]
    dicts = [value for number in published for value in _values(result[number]) if isinstance(value, dict)]
    if any(dicts) and all(_INTEGER.fullmatch(key) for value in dicts for key in value):
        for number in published:
            result[number] = _with_integer_keys(result[number])
    return tuple(result)


def _values(test: Test) -> list[Any]:
    """The arguments of a call test, and the expected value."""
    return [*test["args"], test["expected"]]


def _with_integer_keys(test: Test) -> Test:
    """A call test with integers as keys of its dicts, as test code: tests are stored as JSON, which has none."""
    if not any(isinstance(value, dict) and value for value in _values(test)):
        return test
    *args, expected = (
        {int(key): item for key, item in value.items()} if isinstance(value, dict) else value
        for value in _values(test)
    )
    name = test["call"]
    return {"check": f"assert {name}({', '.join(map(repr, args))}) == {expected!r}", "functions": [name]}


def assertions(
    parts: Sequence[str], entry_point: str | None = None, setup: str = "", solution: str = ""
) -> tuple[Test, ...]:
    """Assert statements, or the code of a `check(candidate)`, as tests of `run_program`.

    A call test needs values that JSON can store exactly: a tuple among the arguments would come back as a list. (In an
    expected value a list also takes a tuple; test code compares as Python does.) Other asserts stay test code. If an
    entry point is given, test code may use no other function of the program. What the published `solution` defines is
    the program's, even under the name of a built-in.
    """
    from marl_jax.rewards.asserts import assert_tests, check_test, free_functions

    tests: list[Test] = []
    defined = set(re.findall(r"^def (\w+)", solution, re.MULTILINE))
    for number, part in enumerate(parts, start=1):
        try:
            new = assert_tests(part, entry_point, setup)
            free = set(free_functions(part, setup))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise RowError(f"test {number}: {error}") from None
        built_in = (defined & {test.get("call") for test in new}) - free
        used = free | built_in
        if "assert" not in part or not (entry_point or used):
            raise RowError(f"test {number} asserts nothing about the program ({' '.join(part.split())[:60]})")
        unknown = ", ".join(sorted(used - {entry_point}))
        if entry_point and unknown and "import *" not in part + setup:
            raise RowError(f"test {number}: its code uses {unknown}, which nothing defines")
        if not all(
            "check" in test or (_is_json(test["args"]) and _is_json(test["expected"], True)) for test in new
        ):
            new = [check_test(part, entry_point or min(built_in, default=None), setup)]
        tests += new
    return tuple(tests)


def text(row: Row, *names: str, number: bool = False) -> str:
    """The first of the named fields that the row has, as non-empty text; with `number`, a number is accepted too."""
    for name in names:
        value = row.get(name)
        if value is None:
            continue
        if number and isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if number and isinstance(value, float):
            if not math.isfinite(value):
                raise RowError(f"field {name!r} is {value}, which is no answer")
            # Beyond 2**53 the digits of a float are not those that were written: 6.02e23 stays 6.02e+23.
            return str(int(value)) if value == int(value) and abs(value) < 2**53 else str(value)
        checked = check_text(name, value)
        return checked.strip() if number else checked
    has = ", ".join(str(name) for name in row if row[name] is not None) or "nothing"
    raise RowError(f"field {' or '.join(map(repr, names))} is missing (the row has {has})")


def check_text(name: str, value: Any) -> str:
    """The value of a field, which must be non-empty text."""
    if fault := text_fault(name, value):
        raise RowError(fault)
    return value


def optional_text(row: Row, name: str) -> str:
    """The named field as text; "" if it is missing or blank."""
    value = row.get(name)
    return "" if value is None or (isinstance(value, str) and not value.strip()) else text(row, name)


def _form(test: Test, function: str | None) -> tuple[Any, Any]:
    """The type of a published test, and the name of the function that it calls."""
    name = test.get("fn_name") or _function_name(test.get("metadata")) or function
    kind = test.get("type") or test.get("testtype")
    return kind or ("function_call" if name else "stdin"), name


def _program_test(number: int, test: Any, function: str | None, wrapped: bool) -> Test:
    if not isinstance(test, dict):
        raise RowError(f"test {number} is {type(test).__name__}, not an object")
    # In a parquet file, every test has the keys of all forms.
    filled = {key: value for key, value in test.items() if value is not None}
    if "call" in filled and "expected" in test:
        return filled | {"expected": test["expected"]}
    if {"stdin", "stdout"} <= filled.keys() or "check" in filled:
        return filled
    if not {"input", "output"} <= test.keys():
        raise RowError(f"test {number} has no input and output (it has {', '.join(map(str, test))})")
    inputs, expected = test["input"], test["output"]
    kind, name = _form(test, function)
    if kind == "functional":  # LiveCodeBench: one JSON value per line
        inputs = [
            _from_json(line, f"test {number}") for line in _lines(number, inputs).split("\n") if line.strip()
        ]
        expected, wrapped = _from_json(_lines(number, expected), f"test {number}"), False
    if kind in ("function_call", "functional"):
        if not name or not isinstance(inputs, list):
            raise RowError(f"test {number} calls a function but has no function name or no list of arguments")
        if not isinstance(name, str):
            raise RowError(f"test {number} has {type(name).__name__} where the name of a function should be")
        return {"call": name, "args": inputs, "expected": expected[0] if wrapped else expected}
    if kind not in ("stdin_stdout", "stdin"):
        raise RowError(f"test {number} is of the unknown type {kind!r}")
    return {"stdin": _lines(number, inputs), "stdout": _lines(number, expected)}


def _from_json(value: str, where: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{where} is not JSON ({error})") from None


def _lines(number: int, value: Any) -> str:
    if isinstance(value, list):
        value = "\n".join(map(str, value))
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise RowError(f"test {number} has {type(value).__name__} where text for stdin or stdout should be")
    return value


def _strings(row: Row, name: str) -> Sequence[str]:
    value = row.get(name)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RowError(f"field {name!r} is missing or not a list of texts")
    return value


def _function_name(metadata: Any) -> str | None:
    if isinstance(metadata, str) and metadata.strip():
        metadata = _from_json(metadata, "field 'metadata'")
    return metadata.get("func_name") if isinstance(metadata, dict) else None


def _source_id(row: Row, *names: str) -> dict[str, str]:
    return next(({"source_id": str(row[name])} for name in names if row.get(name) is not None), {})


def _is_json(value: Any, tuples: bool = False) -> bool:
    if isinstance(value, list) or (tuples and isinstance(value, tuple)):
        return all(_is_json(item, tuples) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item, tuples) for key, item in value.items())
    return value is None or isinstance(value, bool | int | float | str)
