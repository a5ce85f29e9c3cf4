"""Programs pass when every test passes, and a verdict says which test failed and why."""

import sys
import textwrap
import time

import numpy as np
import pytest
from pace import slowness

from marl_jax.rewards import Pool, assert_tests, extract_program, parse_tests, run_program, submit_program
from marl_jax.rewards.code import Computed, compute
from marl_jax.rewards.families import grade_answer
from marl_jax.rewards.sandbox.verdicts import Verdict, resolved
from marl_jax.rewards.warn import newly_ungraded
from marl_jax.task import Task

DOUBLE = "print(2 * int(input()))"


@pytest.fixture(scope="module")
def pool():
    with Pool(workers=2) as pool:
        yield pool


def script(source, stdin="", stdout="", pool=None, **limits):
    return run_program(textwrap.dedent(source), [{"stdin": stdin, "stdout": stdout}], pool=pool, **limits)


def call(source, name, args, expected, pool=None, **limits):
    tests = [{"call": name, "args": args, "expected": expected}]
    return run_program(textwrap.dedent(source), tests, pool=pool, **limits)


@pytest.mark.parametrize(("lost", "reward"), [(1, 1.0), (2, 1.0), (3, 0.0)])
def test_a_program_whose_sandbox_fails_is_graded_again(monkeypatch, lost, reward):
    verdicts = iter([Verdict(False, "the sandbox was lost", lost=True)] * lost + [Verdict(True, "")])
    monkeypatch.setattr("marl_jax.rewards.code.submit_program", lambda *_, **__: resolved(next(verdicts)))
    task = Task(id="t", family="code", question="?", tests=({"stdin": "2", "stdout": "4"},))
    newly_ungraded()
    assert (grade_answer(task, DOUBLE), newly_ungraded()) == (reward, 1 - reward)


@pytest.mark.parametrize(
    "source",
    [
        "print(input()); print(input())",
        "import sys\nprint(sys.stdin.read())",
        "import sys\nfor line in sys.stdin: print(line)",
        "import sys\nprint(*sys.stdin.readlines())",
        "import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())",
        "import os\nos.write(1, os.read(0, 100))",
        "print(open(0).read())",
        "print(open('/dev/stdin').read())",
        "import fileinput\nfor line in fileinput.input(): print(line)",
        "import sys\nprint(sys.__stdin__.read())",
        "import sys\nsys.__stdout__.write(sys.stdin.read())",
        "import asyncio, sys\nasync def main(): print(sys.stdin.read())\nasyncio.run(main())",
        "import atexit, sys\ntext = sys.stdin.read()\natexit.register(lambda: print(text))",
        "import io, sys, atexit, os\nout = sys.stdout = io.StringIO()\n"
        "atexit.register(lambda: os.write(1, out.getvalue().encode()))\nprint(sys.stdin.read())",
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**27)\n"
        "t = threading.Thread(target=lambda: print(sys.stdin.read()))\nt.start()",
        "if __name__ == '__main__':\n    print(input())\n    print(input())",
        "import sys\nprint(sys.stdin.read())\nsys.exit(0)",
        "import resource, sys\nresource.setrlimit(resource.RLIMIT_STACK, (resource.RLIM_INFINITY,) * 2)\n"
        "print(sys.stdin.read())",
        "import sys\nprint(sys.stdin.read())\nexit()",
        "import os, sys\nprint(sys.stdin.read(), flush=True)\nos._exit(0)",
        "import codecs, sys\nsys.stdout = codecs.getwriter('utf8')(sys.stdout.detach())\nprint(sys.stdin.read())",
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach(), 'utf8')\nprint(sys.stdin.read())",
        "import sys\nout = open(1, 'w', encoding='utf8')\nout.write(sys.stdin.read())",
        "import sys\nclass Last:\n    def __del__(self): print(text)\ntext = sys.stdin.read()\nlast = Last()",
        "import sys\ndef parts():\n    try: yield\n    finally: print(sys.stdin.read())\np = parts()\nnext(p)",
        "import sys\ndef main():\n    out = open(1, 'w', encoding='utf8')\n    out.write(sys.stdin.read())\n"
        "    sys.exit()\nmain()",
        "import sys, weakref\nmany = [[n] for n in range(1_200_000)]\nclass Dead: pass\n"
        "dead = weakref.proxy(Dead())\nout = open(1, 'w', encoding='utf8')\nout.write(sys.stdin.read())",
        "import sys\nfrom multiprocessing.pool import ThreadPool\nprint(ThreadPool(2).map(str, [sys.stdin.read()])[0])",
        "import shutil, sys\nopen('a', 'w').write(sys.stdin.read())\nshutil.copy2('a', 'b')\nprint(open('b').read())",
    ],
)
def test_every_way_to_read_and_write(source, pool):
    verdict = script(source, "α 1\n2.5\n", "α 1\n2.5\n", pool=pool)
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize(
    "source, reason",
    [
        ("print(43)", "test 0: wrong answer"),
        ("print(42) if", "test 0: SyntaxError"),
        ("print(42)\n1 / 0", "test 0: ZeroDivisionError: division by zero"),
        ("print(42)\nimport sys\nsys.exit(3)", "test 0: exit status 3"),
        ("print(42)\nimport sys\nsys.exit('sorry')", "test 0: exit status 1"),
        ("import sys\nsys.exit(0)", "test 0: wrong answer"),
        ("input()", "test 0: EOFError"),
        ("while True: pass", "test 0: time limit of 0.5 s"),
        ("print(42)\nimport time\ntime.sleep(9)", "test 0: time limit of 0.5 s"),
        ("x = bytearray(10**9)", "test 0: MemoryError"),
        ("import multiprocessing\nmultiprocessing.Process(target=print).start()", "test 0: PermissionError"),
        ("import numpy_is_not_here", "test 0: ModuleNotFoundError"),
        ("\0", "test 0: "),
        ("x = '\ud800'", "test 0: "),
    ],
)
def test_a_failure_is_explained(source, reason, pool):
    limit = 0.5 if "time limit" in reason else 10
    verdict = script(source, stdout="42", pool=pool, time_limit_s=limit, memory_limit_mb=128)
    assert not verdict.passed
    assert verdict.reason.startswith(reason)


@pytest.mark.parametrize("source", [None, "", " \n\t"])
def test_no_program_fails(source):
    assert run_program(source, [{"stdin": "", "stdout": ""}]).reason == "no program"


def test_a_program_that_is_no_text_is_refused():
    with pytest.raises(TypeError, match="source is bytes"):
        run_program(b"print()", [{"stdin": "", "stdout": ""}])


def test_calls(pool):
    assert call("def f(a, b): return a + b", "f", [1, 2], 3, pool).passed
    assert call("def f(a): return a, [a], {a: {a}}", "f", ("x",), ["x", ["x"], {"x": {"x"}}], pool).passed
    assert call("f = lambda *a: len(a)", "f", [], 0, pool).passed
    assert call("def f(x): return x", "f", [10**5000], 10**5000, pool).passed
    assert call("def f(x): return x > 1", "f", [2], 1, pool).reason == "test 0: wrong answer"
    assert call("def f(x): return print", "f", [2], 1, pool).reason.endswith(
        "a value of type builtin_function_or_method"
    )
    assert (
        call("def g(x): return x", "f", [2], 2, pool).reason == "test 0: NameError: the program defines no f"
    )
    assert call("import sys\nsys.exit(0)", "f", [2], 2, pool).reason == "test 0: SystemExit: 0"


def test_what_a_program_returns_is_computed_twice(pool):
    def of(source, *args, **limits):
        return compute(textwrap.dedent(source), "f", args, pool=pool, **limits)

    assert of("def f(a, b): return [a + b, 'x', None]", 1, 2) == Computed([3, "x", None])
    for changing in ("time.time_ns()", "id([])", "str(object())", "hash(object())"):
        said = of(f"import time\ndef f(): return {changing}")
        assert said.reason == "two runs return different values", changing
    assert of("def f():\n    while True: pass", time_limit_s=0.5).reason == "time limit of 0.5 s"
    assert of("def f(:").reason.startswith("SyntaxError") and of("def g(): pass").reason.startswith(
        "NameError"
    )
    assert of("def f(): return 1 / 0").reason.startswith("ZeroDivisionError")
    for other in ("{1: 2}", "(1,)", "{1}", "10**30", "float('nan')"):
        assert of(f"def f(): return {other}").reason.startswith("it returns other things"), other
    assert of("import os\ndef f(): os._exit(0)").value is None
    assert of("def f(): return f").value is None
    for forged in ('["ok",1e999]', '["ok",' + "[" * 500 + "]" * 500 + "]"):
        frame = len(forged).to_bytes(4, "big") + forged.encode()
        said = of(f"import os\ndef f():\n    os.write(3, {frame!r})\n    os._exit(0)")
        assert said.reason.startswith("it returns other things"), forged[:20]


def test_a_method_of_solution_is_called_on_a_fresh_one(pool):
    source = """
        class Solution:
            def __init__(self):
                self.seen = 0
            def count(self, xs):
                self.seen += len(xs)
                return self.seen
    """
    tests = [{"call": "count", "args": [[1, 2]], "expected": 2}] * 2
    assert run_program(textwrap.dedent(source), tests, pool=pool).passed


def test_solution_comes_before_a_function_of_the_same_name(pool):
    """As in LiveCodeBench's own harness."""
    source = "def f(x):\n    return x + 1\nclass Solution:\n    def f(self, x):\n        return 2 * f(x)"
    assert call(source, "f", [1], 4, pool).passed
    assert call(source + "\ndef g(x):\n    return x", "g", [1], 1, pool).passed


def test_a_called_program_is_imported_not_run(pool):
    source = "def f(): return __name__\nif __name__ == '__main__':\n    1 / 0"
    assert call(source, "f", [], "solution", pool).passed


def test_every_test_starts_afresh_and_has_its_own_time(pool):
    source = "import time\nseen = []\ndef f(x):\n    time.sleep(1.0)\n    seen.append(x)\n    return seen"
    tests = [{"call": "f", "args": [n], "expected": [n]} for n in range(3)]
    assert run_program(source, tests, time_limit_s=2.5, pool=pool).passed  # in 3 s, all together


def test_the_first_failing_test_is_named(pool):
    tests = [{"stdin": str(n), "stdout": str(n + n)} for n in range(3)]
    assert run_program(DOUBLE, tests, pool=pool).reason == "passed 3 of 3"
    tests[1] = {"stdin": "1", "stdout": "3"}
    tests[2] = {"stdin": "x", "stdout": "3"}
    assert run_program(DOUBLE, tests, pool=pool).reason == "test 1: wrong answer"


def test_the_same_program_gives_the_same_answer():
    source = "import random\ndef f(): raise ValueError(random.random(), {'a', 'b', 'c', 'd'}, hash('x'))"
    reasons = set()
    for _ in range(2):
        with Pool(workers=1) as pool:
            reasons.add(call(source, "f", [], None, pool).reason)
    assert len(reasons) == 1


def test_large_inputs_and_outputs(pool):
    many = "\n".join(map(str, range(300_000)))
    assert script("import sys\nsys.stdout.write(sys.stdin.read())", many, many, pool=pool).passed
    assert call(
        "def f(xs): return xs[::-1]", "f", [list(range(100_000))], list(range(99_999, -1, -1)), pool
    ).passed
    talks = "def f(n):\n    for i in range(n): print('step', i, 'of', n)\n    return n"
    assert call(talks, "f", [100_000], 100_000, pool).passed  # 1.9 MB that nobody reads
    deep = "import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return n and 1 + f(n - 1)\nprint(f(50_000))"
    assert script(deep, stdout="50000", pool=pool).passed
    assert script("print(len(str(10 ** 20_000)))", stdout="20001", pool=pool).passed


UNITTEST = (
    "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        self.assertEqual(f(1), 1)\n"
)


@pytest.mark.parametrize(
    "tests, message",
    [
        ([], "no tests"),
        ("print", "tests is str"),
        (None, "tests is NoneType"),
        ([{"stdin": "", "stdout": ""}, 5], "test 2 is int"),
        ([{"stdin": ""}], r"test 1 has the keys \['stdin'\]"),
        ([{"stdin": "", "output": ""}], "test 1 has the keys"),
        ([{"stdin": "", "stdout": "", "call": "f"}], "test 1 has the keys"),
        ([{"stdin": "", "stdout": 5}], "test 1: stdout is int, expected str"),
        ([{"call": "f", "args": "ab", "expected": 1}], "test 1: args is str"),
        ([{"call": "f", "args": {}, "expected": 1}], "test 1: args is dict"),
        ([{"call": "f()", "args": [], "expected": 1}], r"test 1: call='f\(\)' is not the name"),
        ([{"call": "f", "args": [], "expected": object()}], "test 1: expected holds a value of type object"),
        ([{"call": "f", "args": [{1: print}], "expected": 1}], "test 1: args holds a value of type builtin"),
        ([{"check": "assert f( =="}], "test 1: the check is not Python"),
        ([{"check": "assert True"}], "test 1: the check uses no function of the program"),
        ([{"check": "x = 1\nassert abs(x) == 1"}], "test 1: the check uses no function of the program"),
        ([{"check": "eval('f(1)')"}], "test 1: the check uses no function of the program"),
        (
            [{"check": "assert True", "functions": ["f"]}],
            r"test 1: the check uses none of its functions \['f'\]",
        ),
        ([{"check": "assert f(1) == g(1)", "functions": ["f"]}], "test 1: the check calls g, which is not"),
        (
            [{"check": "f(1)", "setup": "def h():\n    return g(1)", "functions": ["f"]}],
            "test 1: the check calls g",
        ),
        ([{"check": "def test_f():\n    assert f(1)"}], "test 1: the check defines its tests and calls none"),
        ([{"check": f"x = {{}}\n{UNITTEST}"}], "test 1: the check defines its tests and calls none"),
        ([{"check": f"{UNITTEST}unittest.main()"}], "test 1: the check calls unittest.main"),
        ([{"check": f"{UNITTEST}unittest.main(exit=False)"}], "test 1: the check calls unittest.main"),
        (
            [{"check": f"{UNITTEST}from unittest import main as go\ngo(exit=False)"}],
            "test 1: the check calls unittest.main",
        ),
        *(
            ([{"check": f"{UNITTEST}{runs}"}], "test 1: the check runs tests and reads no result")
            for runs in (
                "unittest.TextTestRunner().run(unittest.TestSuite([T('test_f')]))",
                "suite = unittest.TestSuite([T('test_f')])\nsuite.run(unittest.TestResult())",
                "T('test_f').run()",
                "T('test_f')()",
                "T('test_f')(unittest.TestResult())",
                "unittest.defaultTestLoader.loadTestsFromTestCase(T).run(unittest.TestResult())",
                "import doctest\ndoctest.testmod()",
            )
        ),
        ([{"check": "import numpy.linalg as la\nassert f(1)"}], "test 1: the check imports numpy, and"),
        (
            [{"check": "assert f(1)", "setup": "from pytest import raises"}],
            "test 1: the check imports pytest",
        ),
        ([{"check": "from .solution import g\nassert f(1)"}], "test 1: the check imports solution"),
        ([{"check": "f()", "functions": "f"}], "test 1: functions is str"),
        ([{"check": "f()", "setup": "1 +"}], "test 1: the check is not Python"),
        ([{"check": "f()", "setup": "1 +", "functions": ["f"]}], "test 1: the check is not Python"),
        ([{"check": "f()\0"}], "test 1: the check is not Python"),
        ([{"check": "f(" + "(" * 10_000}], "test 1: the check is not Python"),
        ([{"check": "f(", "functions": ["f"]}], "test 1: the check is not Python"),
        ([{"stdin": "\ud800", "stdout": ""}], "test 1: stdin holds half a surrogate pair"),
        ([{}], "test 1 has the keys"),
    ],
)
def test_malformed_tests_are_refused_by_number(tests, message):
    with pytest.raises(ValueError, match=message):
        run_program("print()", tests)


@pytest.mark.parametrize(
    "limits",
    [{"time_limit_s": 0}, {"time_limit_s": float("nan")}, {"time_limit_s": None}, {"memory_limit_mb": -1}],
)
def test_limits_must_be_positive(limits):
    with pytest.raises(ValueError, match=next(iter(limits))):
        run_program("print()", [{"stdin": "", "stdout": ""}], **limits)


def test_limits_may_be_numbers_of_numpy(pool):
    limits = {"time_limit_s": np.float32(5), "memory_limit_mb": np.int32(4096)}
    assert run_program("print(1)", [{"stdin": "", "stdout": "1"}], pool=pool, **limits).passed


def test_equal_submissions_run_once(pool):
    source = "import os\ndef f(x): raise ValueError(os.urandom(8).hex())"

    def submit(args, expected, **limits):
        tests = [{"call": "f", "args": args, "expected": expected}]
        return submit_program(source, tests, pool=pool, **limits)

    first, second = submit([1], 1), submit([1], 1)
    assert first.result() == second.result() == submit((1,), 1).result()
    others = [submit([1], 1, time_limit_s=1.5), submit([1], 1.0), submit([True], 1), submit([1], [1])]
    assert len({first.result().reason, *(other.result().reason for other in others)}) == 5


RESPONSE = """First a try:
```python
print("old")
```
then the program:
````py
print("new")
```
not the end
```
````
Done."""


def test_the_program_is_the_last_fenced_block():
    assert extract_program(RESPONSE) == 'print("new")\n```\nnot the end\n```'
    assert extract_program("~~~\nx = 1\n~~~") == "x = 1"
    assert extract_program("```python\nx = 1\ny =") == "x = 1\ny ="
    assert extract_program("```python\nold\n```\n```python\nx = 1") == "x = 1"
    assert extract_program("```\n```") == ""
    assert extract_program("x = `1`") is None
    assert extract_program("") is None


PROGRAM = "def f(x):\n    return x"


@pytest.mark.parametrize(
    "response",
    [
        "1. So:\n\n   ```python\n   def f(x):\n       return x\n   ```\n\nDone.",
        "* So:\n    * here\n\n      ```python\n      def f(x):\n          return x\n      ```",
        "- ```python\n  def f(x):\n      return x\n  ```\n- Done.",
        "- ```python\ndef f(x):\n    return x\n```\n- Done.",
        "\t```\n\tdef f(x):\n\t    return x\n\t```",
        "   ```python\n   def f(x):\n       return x",
        "~~~python\ndef f(x):\n    return x\n~~~~",
        "~~~ {.python title=`f`}\ndef f(x):\n    return x\n~~~",
        '```python title="f.py" linenums="1"\ndef f(x):\n    return x\n```',
        "```{python}\r\ndef f(x):\r\n    return x\r\n```\r\nDone.",
        "```text\nan example\n```\nso\n```Python3\ndef f(x):\n    return x\n``` \n",
        "Use `f` or ```f```.\n```\ndef f(x):\n    return x\n```\nThat is ```f```.",
    ],
)
def test_fences_as_models_write_them(response):
    assert extract_program(response) == PROGRAM


def test_what_is_inside_the_fences_stays_as_it_is():
    assert extract_program('```python\ns = "```"\nprint(s)\n') == 's = "```"\nprint(s)\n'
    fence_in_docstring = 'def f():\n    """\n    ```\n    f()\n    ```\n    """'
    assert extract_program(f"```python\n{fence_in_docstring}\n```\nDone.") == fence_in_docstring
    assert extract_program("```\nx = '\u2028\x0c\x85'\n```") == "x = '\u2028\x0c\x85'"
    assert extract_program("```\ntext = '''\n  \n'''\n```") == "text = '''\n  \n'''"


@pytest.mark.parametrize(
    "response",
    [
        "Here is the code: ```python\n{}\n```",
        "Here is the code: ```python\n{}\n```\nIt returns x.",
        "Here is the code: ```\n{}\n```\nIt returns `x`.",
        "Here is the code: ```python\n{}",
        "Here is the code: ```python\n{}```\nDone.",
        "1. Here: ```python\n{}\n```\nDone.",
        "First: ```python\nold\n```\nNow better: ```python\n{}\n```\nDone.",
        "First: ```python\nold\n```\nNow better:\n```python\n{}\n```",
        "<think>\n```python\nold\n```\n</think>```python\n{}\n```\nDone.",
        "</think>```python\n{}\n```",
        "```python\n{}```",
        "```python\n{}```\nDone. It returns `x`.",
        "```python\n{}```.\nDone.",
        "```python\n{}\n```.",
        "```python\n{}\n```.\nDone.",
        "<answer>\n```python\n{}\n```</answer>",
        "```python\n{}\n``` <|im_end|>",
        "**Answer:**\n```python\n{}\n```**",
        "$$\\boxed{```python\n{}\n```}$$\nDone.",
        "```python\n{}\n``` It returns `x`.\nDone.",
        "```python\nold\n```Or better:\n```python\n{}\n```",
        "```python\nold```\nor\n```python\n{}\n```",
        "```python\nold\n```.\nor\n```python\n{}\n```",
        # Fences in running text are none while the others pair.
        "```python\n{}\n```\nThat was a block that starts with ```python\nas you asked.",
        "```python\n{}\n```\nDone.```\nHope this helps!",
        "It starts with ```python\nand so on:\n```\n{}\n```",
    ],
)
def test_fences_beside_text_in_a_line(response):
    assert extract_program(response.replace("{}", PROGRAM)) == PROGRAM


@pytest.mark.parametrize(
    "program",
    [
        'def f():\n    """Example: ```\n    f()\n    ```\n    """\n    return 1',
        'def f():\n    """Example: ```python\n    f()\n    """\n    return 1',
        "def f():\n    # Example: ```\n    # f()\n    # ```\n    return 1",
        "text = '''a```\nb```.\n'''\nprint(text)",
        "text = '```python'\nprint(text + '```')",
        "import re\nprint(re.findall('```(.*?)```', input()))",
    ],
)
@pytest.mark.parametrize("response", ["```python\n{}\n```", "So:\n```\n{}\n```\nDone.", "```\n{}"])
def test_backticks_of_a_program_are_no_fences(program, response):
    assert extract_program(response.replace("{}", program)) == program


@pytest.mark.parametrize(
    "response",
    [
        "```. " * 50_000,
        "```\n" + "`" * 200_000 + "x",
        "- " + " " * 200_000 + "``",
        "a```\n" * 20_000,
        "```\n'''\n" + "a```.\n" * 20_000,
    ],
    ids=range(5),
)
def test_many_odd_fences_take_little_time(response):
    start = time.thread_time()
    extract_program(response)
    assert time.thread_time() - start < 2 * slowness()


def test_a_byte_order_mark_is_skipped(pool):
    assert script("\ufeffprint(6)", stdout="6", pool=pool).passed
    assert call("\ufeffdef f(): return 6", "f", [], 6, pool).passed
    assert "SyntaxError" in script("\ufeff\ufeffprint(6)", stdout="6", pool=pool).reason
    assert run_program("\ufeff", [{"stdin": "", "stdout": ""}]).reason == "no program"


def test_the_last_block_counts_whatever_its_language():
    assert extract_program("```python\nx = 1\n```\nIt prints:\n```text\n1\n```") == "1"


def test_grades_of_responses():
    passes = lambda response: run_program(extract_program(response), [{"stdin": "4", "stdout": "8"}]).passed
    assert passes(f"So:\n```python\n{DOUBLE}\n```\n")
    assert not passes("So:\n```python\nprint(9)\n```\n")
    assert not passes(DOUBLE)


MBPP = [
    "assert remove_odd([1,2,3]) == [2]",
    "assert remove_odd([]) == []",
    "assert set(remove_odd([4, 4])) == {4}",
    "assert math.isclose(sum(remove_odd([2, 4])), 6)",
]
HUMAN_EVAL = """

METADATA = {'author': 'x'}


def check(candidate):
    assert candidate([1.0, 2.0], 0.3) == True
    assert candidate([], -1) == False, "empty"
    assert True, "trivial"
"""


def test_asserts_of_literals_become_calls_and_others_checks():
    tests = [test for code in MBPP for test in assert_tests(code, setup="import math")]
    assert tests[:2] == [
        {"call": "remove_odd", "args": [[1, 2, 3]], "expected": [2]},
        {"call": "remove_odd", "args": [[]], "expected": []},
    ]
    assert tests[2:] == [{"check": source, "setup": "import math"} for source in MBPP[2:]]
    assert [test.functions for test in parse_tests(tests)[2:]] == [("remove_odd",), ("remove_odd",)]


def test_a_check_function_of_literals_becomes_calls():
    assert assert_tests(HUMAN_EVAL, "close") == [
        {"call": "close", "args": [[1.0, 2.0], 0.3], "expected": True},
        {"call": "close", "args": [[], -1], "expected": False},
    ]
    (check,) = assert_tests(HUMAN_EVAL + "    assert abs(candidate([2], 1)) < 1\n", "close")
    assert check["check"].endswith("check(close)\n")
    assert check["functions"] == ["close"]


@pytest.mark.parametrize(
    "code",
    ["assert f(x) == 1", "assert f(1) == g(1)", "assert f(a=1) == 1", "assert f(1) < 2", "assert not f(1)"],
)
def test_what_is_more_than_a_literal_stays_code(code):
    assert assert_tests(code) == [{"check": code}]


def test_asserts_that_are_not_python_are_refused():
    with pytest.raises(ValueError, match="not Python"):
        assert_tests("assert f(")


def test_checks_call_the_program_in_another_process(pool):
    good = "def remove_odd(xs): return [x for x in xs if x % 2 == 0]"
    tests = [test for code in MBPP for test in assert_tests(code, setup="import math")]
    assert run_program(good, tests, pool=pool).passed
    verdict = run_program("def remove_odd(xs): return []", assert_tests(MBPP[2]), pool=pool)
    assert verdict.reason == "test 0: check failed: AssertionError"


def test_checks_see_values_keywords_and_exceptions(pool):
    source = (
        "def f(x, *, y=0):\n    if x < 0: raise ValueError('negative')\n    return {'x': (x, y), 's': {x}}"
    )
    check = """
        import math
        assert f(1) == {'x': (1, 0), 's': {1}}
        assert f(1, y=2.5)['x'] == (1, 2.5)
        assert isinstance(f(1)['x'], tuple)
        for n in range(20):
            assert f(n)['s'] == {n}
        try:
            f(-1)
        except ValueError as error:
            assert 'negative' in str(error)
        else:
            assert False
    """
    assert run_program(source, [{"check": textwrap.dedent(check)}], pool=pool).passed


SETUP = """
from math import *
def poly(xs, x):
    return sum(c * x**n for n, c in enumerate(xs))
def find_zero(xs):
    pass
"""


def test_stubs_and_names_of_python_are_called_in_the_program():
    assert assert_tests("assert f(1) == [1, 2]", "f", setup="def f(x): ...") == assert_tests(
        "assert f(1) == [1, 2]"
    )
    assert [set(test) for test in assert_tests("assert sum(10, 15) == 6\nassert sum(1, 2) == 3")] == [
        {"call", "args", "expected"}
    ] * 2


def test_a_function_of_the_setup_is_not_called_in_the_program(pool):
    for code, entry in (("assert run(1) == 2", None), ("assert f(1) == 2\nassert len([1]) == 1", "f")):
        (test,) = assert_tests(code, entry, setup="def run(x): return f(x)")
        assert {"check", "setup"} <= set(test)
        assert run_program("def f(x): return 2 * x", [test], pool=pool).passed
        assert not run_program("def f(x): return x", [test], pool=pool).passed


@pytest.mark.parametrize("functions", [["find_zero"], []])
def test_helpers_in_the_setup_are_the_tests_own(functions, pool):
    check = "assert abs(poly([2, 1], find_zero([2, 1]))) < 1e-4 and sqrt(4) == 2"
    setup = SETUP if functions else SETUP[: SETUP.index("def find_zero")]
    tests = [{"check": check, "setup": setup, "functions": functions}]
    cheat = "def poly(xs, x): return 0\nsqrt = poly\ndef find_zero(xs): return 5"
    right = "def sqrt(x): return 0\ndef find_zero(xs): return -xs[0] / xs[1]"
    assert run_program(cheat, tests, pool=pool).reason == "test 0: check failed: AssertionError"
    assert run_program(right, tests, pool=pool).passed


@pytest.mark.parametrize(
    "check",
    [
        *("exec('g = 2')\nassert g and f(1)", "from math import *\nassert sqrt(f(1))", "assert eval('f(1)')"),
        *(
            "assert [*map(f, [1])]",
            "def g(): return f(1)\nassert g()",
            "try:\n    import numpy\nexcept ImportError:\n    numpy = None\nassert f(1)",
            "def now(g): return g()\n@now\ndef g(): assert f(1)",
            "class T:\n    assert f(1)",
            f"{UNITTEST}T('test_f').debug()",
            f"{UNITTEST}result = unittest.TextTestRunner().run(T('test_f'))\nassert result.wasSuccessful()",
            f"{UNITTEST}class R(unittest.TestResult):\n    def addFailure(self, test, error):\n"
            "        raise AssertionError\nT('test_f').run(R())",
            "import doctest\nassert f(1) and doctest.testmod()[0] == 0",
            "import doctest\nassert f(1)\ndoctest.testmod(raise_on_error=True)",
            "import math as g\nassert g.sqrt(f(1))",
        ),
    ],
)
def test_a_check_is_taken_at_its_word_where_its_names_cannot_be_told(check, pool):
    assert run_program("def f(x): return x", [{"check": check, "functions": ["f"]}], pool=pool).passed


def test_a_check_that_asks_nothing_passes_nothing(pool):
    verdict = run_program("1 / 0", [{"check": "if not __name__: f(1)"}], pool=pool)
    assert verdict.reason == "test 0: the check called no function of the program"


@pytest.mark.parametrize(
    "source, reason",
    [
        ("def f(x): return", "test 0: check failed: AssertionError"),
        ("def g(x): return", "test 0: check failed: NameError"),
        ("f =", "test 0: SyntaxError"),
        ("1 / 0", "test 0: ZeroDivisionError"),
        ("def f(x):\n    while True: pass", "test 0: time limit of 0.5 s"),
        ("while True: pass", "test 0: time limit of 0.5 s"),
        ("import os\nos._exit(0)", "test 0: ended before it answered"),
    ],
)
def test_a_failed_check_is_explained(source, reason, pool):
    limit = 0.5 if "time limit" in reason else 10
    verdict = run_program(source, [{"check": "assert f(1)"}], time_limit_s=limit, pool=pool)
    assert not verdict.passed
    assert verdict.reason.startswith(reason)


def test_answers_in_the_manner_of_leetcode_need_no_imports():
    source = """
class Solution:
    def least(self, numbers: List[int], k: Optional[int] = None) -> int:
        counts = Counter(numbers)
        heap = list(counts)
        heapify(heap)
        return heappop(heap) + math.floor(0.5) + collections.deque([0])[0]
"""
    tests = [{"call": "least", "args": [[3, 1, 2]], "expected": 1}]
    assert run_program(source, tests, time_limit_s=5, memory_limit_mb=256).passed


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 14), reason="Python itself bounds calls through C there"
)
def test_answers_in_the_manner_of_leetcode_may_recurse_deeply():
    """As with the preamble that graders of this data put before them, which imports sys, json and io, too."""
    source = """
class Solution:
    def depth(self, text: str) -> int:
        n = json.load(StringIO(text))
        @cache
        def down(i): return 0 if i == 0 else 1 + down(i - 1)
        return min(down(n), sys.maxsize)
"""
    tests = [{"call": "depth", "args": ["5000"], "expected": 5000}]
    assert run_program(source, tests, time_limit_s=5, memory_limit_mb=256).passed


def test_names_that_are_lent_give_way_to_the_programs_own_and_to_pythons():
    source = "def sqrt(x): return 'mine'\ndef f(x): return [sqrt(x), pow(2, 3, 5), Counter is None]\nCounter = None"
    tests = [{"call": "f", "args": [4], "expected": ["mine", 3, True]}]
    assert run_program(source, tests, time_limit_s=5, memory_limit_mb=256).passed


def test_a_lent_function_is_not_the_programs():
    verdict = run_program(
        "x = 1", [{"call": "sqrt", "args": [4], "expected": 2}], time_limit_s=5, memory_limit_mb=256
    )
    assert not verdict.passed


@pytest.mark.parametrize(
    "response, program",
    [
        ("<think>\n```python\nold\n</think>\n```python\n{}\n```\nDone.", PROGRAM),
        ("```python\nold\n\nNow better:\n```py\n{}\n```", PROGRAM),
        ("```text\nold\n\n```python\nold\n\n```python\n{}\n```", PROGRAM),
        # A fence in a string, or further in than the first, is of the program.
        (
            "```python\nold\n```python\nx = '''\n```python\n{}\n'''\n```",
            f"x = '''\n```python\n{PROGRAM}\n'''",
        ),
        ("```python\nold\n  ```python\n{}\n```", f"old\n  ```python\n{PROGRAM}"),
    ],
)
def test_a_block_without_an_end_ends_where_the_next_begins(response, program):
    assert extract_program(response.replace("{}", PROGRAM)) == program


@pytest.mark.parametrize("tail", ["```\n", "```python\n", "```\n\n```\n"])
def test_a_stray_fence_does_not_undo_the_program_before_it(tail):
    assert extract_program("so:\n```python\nprint(1)\n```\n" + tail) == "print(1)"
