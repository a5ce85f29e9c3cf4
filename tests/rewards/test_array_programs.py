"""Programs of the chain language that are run in arrays get the verdict that Python and the sandbox give them."""

import functools
import itertools
import random

import jax
import numpy as np
import pytest
from array_rows import said_by_a_base, spelled

from marl_jax.rewards import arrays, run_program
from marl_jax.rewards.compare import same_value
from marl_jax.rewards.families import program
from marl_jax.task import Task
from marl_jax.tasks import micro, micro_code

GRADE = jax.jit(arrays.grade_programs)
BLOCK = 512
NUMBERS, LISTS = [-40, -3, 0, 7, 99], [[3, 1, 2], [0, 9, 5, 2], [7, 7, 1, 8], [2, 4, 6, 8, 1], [9, 0, 3]]
TABLE = {**micro_code._NUMBER, **micro_code._LIST, **micro_code._REDUCE}


def graded(responses, tasks):
    """(right, beyond) of responses to tasks, in blocks of one shape."""
    text, tests = spelled(responses, 128), arrays.pack_tests(tasks)
    leaves, shape = jax.tree.flatten((text, tests))
    right, beyond = np.zeros(len(responses), bool), np.zeros(len(responses), bool)
    for start in range(0, len(responses), BLOCK):
        at = np.minimum(np.arange(start, start + BLOCK), len(responses) - 1)
        block = [np.asarray(leaf)[at] for leaf in leaves]
        verdict, _ = GRADE(*jax.tree.unflatten(shape, block))
        right[at], beyond[at] = verdict.right, verdict.beyond
    return right, beyond


@functools.cache
def compiled(source):
    try:
        return compile(source, "program", "exec")
    except SyntaxError:
        return None


def by_python(task, response):
    """Python's own verdict on a program that is made here, without the sandbox."""
    namespace = {}
    if (code := compiled(program(task, response) or "")) is None:
        return False
    try:
        exec(code, namespace)
        return all(same_value(namespace["f"](*test["args"]), test["expected"]) for test in task.tests)
    except Exception:
        return False


def written(body):
    return f"```python\ndef f(x):\n{body}\n```"


def asked(response, inputs):
    """A task that the program of a response solves, where it runs; else one with other results."""
    namespace = {}
    expected = list(inputs)
    try:
        exec(compiled(program(Task("", "code", ""), response)), namespace)
        expected = [namespace["f"](value) for value in inputs]
    except Exception:
        pass
    if not all(
        type(n) is int and abs(n) <= 2**30 for e in expected for n in (e if isinstance(e, list) else [e])
    ):
        expected = list(inputs)
    if any(isinstance(e, list) and len(e) > 8 for e in expected):
        expected = list(inputs)
    tests = tuple({"call": "f", "args": [value], "expected": e} for value, e in zip(inputs, expected))
    return Task("a task", "code", "", tests=tests)


def agree(responses, tasks, verdict=by_python):
    expected = np.array([verdict(task, response) for task, response in zip(tasks, responses)])
    right, beyond = graded(responses, tasks)
    different = np.flatnonzero((right != expected) & ~beyond)
    assert not different.size, [(responses[i], tasks[i].tests[:2], bool(right[i])) for i in different[:5]]
    assert not (right & beyond).any()
    return expected, beyond


def chains(length, constants=(0, 1, 2, 7)):
    """Every chain of so many operations, of those that the tasks are made of, over a few constants."""
    steps = [
        (name, c)
        for name, (_, _, range_) in TABLE.items()
        for c in ((None,) if range_ is None else constants)
    ]
    return itertools.product(steps, repeat=length)


def programs(length, **kwargs):
    """Both ways of writing each chain that fit into 64 tokens."""
    for chain in chains(length, **kwargs):
        for strategy in micro_code.STRATEGIES:
            yield micro_code._program(chain, strategy)


def sandboxed(task, response):
    return run_program(program(task, response), task.tests).passed


@pytest.mark.long
def test_worked_programs_and_mistakes_of_the_micro_tasks():
    tasks = list(micro.take("micro_code", "train", 200, levels=(1, 2, 3, 4, 5)))
    responses = [micro.solution(task, way) for way in micro_code.STRATEGIES for task in tasks]
    responses += [micro.mistake(task, seed) for seed in range(2) for task in tasks]
    right, beyond = graded(responses, 4 * tasks)
    assert right.tolist() == [True] * 400 + [False] * 400
    assert not beyond.any()


def test_every_program_of_one_operation_gets_the_sandboxs_verdict():
    responses = list(dict.fromkeys(programs(1, constants=(0, 3))))
    inputs = [NUMBERS if i % 2 else LISTS for i in range(2 * len(responses))]
    responses = [response for response in responses for _ in range(2)]
    tasks = [asked(response, values) for response, values in zip(responses, inputs)]
    expected, beyond = agree(responses, tasks, sandboxed)
    assert 0.3 < expected.mean() < 0.9
    repeated = {written(f" return x*{c}") for c in (0, 3)}  # [1, 2] * 3
    assert {r for r, far in zip(responses, beyond) if far} == repeated


@pytest.mark.campaign
def test_every_program_of_two_operations_gets_pythons_verdict():
    responses = list(dict.fromkeys(programs(2, constants=(0, 2))))
    tasks = [asked(response, NUMBERS if i % 2 else LISTS) for i, response in enumerate(responses)]
    expected, beyond = agree(responses, tasks)
    assert expected.mean() > 0.2
    assert beyond.mean() < 0.1


AROUND = """{}+3|{}-1|{}*2|{}%4|{}//2|-{}|({})|abs({})|max({},3)|min({},-1)|{}*{}|sum({})|[i+1 for i in {}]|
[i for i in {} if i>2]|[i for i in {} if i%2==0]|{}[:2]|{}[1:]|{}[::-1]|sorted({})|len({})|max({},default=0)|
3-{}|{}+x|{}**1|[{}]|{} |{}*07|(-{})|{}/2""".replace("\n", "").split("|")


def soups(seed, count):
    """Expressions put together at random around x, most of them sound."""
    rng = random.Random(seed)
    for _ in range(count):
        lines = []
        for _ in range(rng.randrange(1, 3)):
            expression = "x"
            for _ in range(rng.randrange(4)):
                expression = rng.choice(AROUND).replace("{}", expression)
            lines.append(expression)
        yield written("\n".join([*(f" x={line}" for line in lines[:-1]), f" return {lines[-1]}"]))


@pytest.mark.long
def test_any_soup_of_operations():
    responses = [soup for soup in soups(0, 1500) if len(soup) < 80]
    tasks = [asked(response, NUMBERS if i % 2 else LISTS) for i, response in enumerate(responses)]
    expected, beyond = agree(responses, tasks)
    assert 0.2 < expected.mean() < 0.9
    assert beyond.mean() < 0.6


@pytest.mark.parametrize(
    "response",
    [
        written(" return 5"),
        written(" y=x\n return y"),
        written("  return x+1"),
        written(" return x +1"),
        written(" return 2*x"),
        written(" x+=1\n return x"),
        written(" if x>2:\n  return 1\n return x"),
        written(" return x**2"),
        written(" return x*1000000*1000000"),
        written(" x=x+1"),
        "```python\nx=3\n```",
        "so ```python\ndef f(x):\n return x+1\n```",
        written(" return x+1") + "\ndone",
        "```python\ndef f(x):\n return x+",
    ],
)
def test_whatever_leaves_the_language_is_counted_and_wrong(response):
    right, beyond = graded([response], [asked(response, NUMBERS)])
    assert beyond.tolist() == [True]
    assert right.tolist() == [False]


def test_a_program_that_was_cut_after_a_whole_line_counts():
    whole = written(" return x+1")
    responses = [whole[:-4], whole[:-3], whole.replace("python", "")]
    expected, beyond = agree(responses, [asked(written(" return x+1"), NUMBERS)] * 3)
    assert expected.all()
    assert not beyond.any()


@pytest.mark.parametrize("fence", ["```", " ```", "  ```"])
def test_a_fence_may_end_the_line_of_code(fence):
    """As the hosted reader takes it; behind a quote or a comment it is beyond the arrays."""
    task = asked(written(" return x+1"), NUMBERS)
    shut = lambda line: written(line).removesuffix("\n```") + fence
    expected, beyond = agree([shut(" return x+1"), shut(" return x+2")], [task] * 2)
    assert (expected.tolist(), beyond.tolist()) == ([True, False], [False] * 2)
    _, beyond = agree([shut(" return x+1 # so"), shut(" return 'x'"), shut(" return x+1\n")], [task] * 3)
    assert beyond.tolist() == [True, True, fence != "```"]


@pytest.mark.long
def test_a_response_without_a_program_is_unreadable_and_a_program_is_found():
    text = spelled(["no program", written(" return x+1"), "x+1 `here`"], 128)
    tests = arrays.pack_tests([asked(written(" return x+1"), NUMBERS)] * 3)
    verdict, solved = GRADE(text, tests)
    assert solved.readable.tolist() == [False, True, False]
    assert (verdict.right.tolist(), verdict.beyond.tolist()) == ([False, True, False], [False] * 3)
    row = bytes(np.asarray(text.chars)[1][int(solved.start[1]) : int(solved.end[1])]).decode()
    assert row == "def f(x):\n return x+1"


@pytest.mark.parametrize("value", [0.5, "text", [[1]], list(range(9)), 2**40, True])
def test_tests_that_do_not_fit_are_refused(value):
    task = Task("one", "code", "", tests=({"call": "f", "args": [value], "expected": 1},))
    with pytest.raises(ValueError, match="a test of task 'one' has the value"):
        arrays.pack_tests([task])


def test_tests_of_another_form_are_refused():
    with pytest.raises(ValueError, match="arrays run f\\(x\\) of one argument only"):
        arrays.pack_tests([Task("one", "code", "", tests=({"stdin": "1", "stdout": "1"},))])


@pytest.mark.campaign
def test_every_short_program_gets_the_verdict_of_python_and_a_sample_that_of_the_sandbox():
    responses = list(dict.fromkeys([*programs(1), *programs(2), *programs(3, constants=(2,))]))
    responses = [response for response in responses if len(response) < 110]
    tasks = [asked(response, NUMBERS if i % 2 else LISTS) for i, response in enumerate(responses)]
    agree(responses, tasks)
    sample = random.Random(0).sample(range(len(responses)), 3000)
    agree([responses[i] for i in sample], [tasks[i] for i in sample], sandboxed)
    responses = list(soups(1, 50_000))
    agree(responses, [asked(response, NUMBERS if i % 2 else LISTS) for i, response in enumerate(responses)])


@pytest.mark.campaign
def test_chains_over_all_their_constants_are_inside_the_language():
    steps = lambda table: [(name, c) for name, (_, _, range_) in table.items() for c in range_ or (None,)]
    rng, shapes = random.Random(0), [shape for level in micro_code._CHAINS.values() for shape in level]
    drawn = [(step,) for step in steps(TABLE)]
    drawn += [tuple(rng.choice(steps(table)) for table in rng.choice(shapes)) for _ in range(50_000)]
    made = {
        micro_code._program(chain, strategy): micro_code._kind(chain)
        for chain in drawn
        for strategy in micro_code.STRATEGIES
    }
    made = {response: kind for response, kind in made.items() if len(response) < 110}
    assert len(made) > 20_000
    tasks = [asked(response, NUMBERS if kind == "number" else LISTS) for response, kind in made.items()]
    expected, beyond = agree(list(made), tasks)
    assert not (expected & beyond).any()


@pytest.mark.campaign
def test_thousands_of_programs_of_a_micro_base_get_the_verdict_of_the_sandbox(count=6000, block=1000):
    """Sampled hot, so that they go astray; of those that are right in the sandbox hardly any is beyond the arrays."""
    right, lost = 0, 0
    for texts, tasks in said_by_a_base("micro_code", count // block, block):
        expected, beyond = agree(texts, tasks, sandboxed)
        right, lost = right + int(expected.sum()), lost + int((expected & beyond).sum())
    print(f"{right} of {count} are right in the sandbox, {lost} of them beyond the arrays")
    assert right > 0.05 * count and lost <= 0.02 * right
