"""The house: rooms of about a dozen modules, names that are single, functions of eight arguments, no hidden circles.

Read from the text of the code; nothing is imported.
"""

import ast
import collections
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATHS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "marl_jax").rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text()) for name, path in PATHS.items()}
ROOMS = [name for name, path in PATHS.items() if path.name == "__init__.py"]
LATE = {  # {name that a room loads late: the module that has it}
    f"{room}.{name}": f"{room}.{module}"
    for room in ROOMS
    for node in ast.walk(TREES[room])
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "late"
    for module, names in ast.literal_eval(node.args[1]).items()
    for name in names
}

A_DOZEN = 14
EIGHT = 8
# The contracts of the library, and what takes unrelated things: weights, caches and rows of a model; what an episode,
# engines or a data set are made of.
MORE = {
    "marl_jax.learning.losses.policy_loss",
    "marl_jax.rollouts.scheduler.rollout",
    "marl_jax.sampling.generation.generate",
    "marl_jax.models.qwen3.hidden_states",
    "marl_jax.rollouts.vllm.client.Vllm.__init__",
    "marl_jax.tasks.datasets.load",
}


def functions(tree, name):
    """(full name, node) of the functions and methods of a module, those within functions included."""
    for node in ast.iter_child_nodes(tree):
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        place = f"{name}.{node.name}" if inside else name
        if inside and not isinstance(node, ast.ClassDef):
            yield place, node
        yield from functions(node, place)


def arguments(node):
    """Their number, without `self`."""
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len(given) - (bool(given) and given[0].arg in ("self", "cls"))


def imported(node):
    """The modules of the library that an import loads, their rooms included."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    names = [LATE.get(name, name) for name in names]
    parts = [name.split(".") for name in names if name.split(".")[0] == "marl_jax"]
    return {".".join(some[:end]) for some in parts for end in range(1, len(some) + 1)} & PATHS.keys()


def at_once(tree):
    """The imports that run when a module is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from at_once(node)


NEEDS = {
    name: set().union(*map(imported, at_once(tree)))
    - {name}
    - {room for room in ROOMS if name.startswith(f"{room}.")}
    for name, tree in TREES.items()
}


def reached(name):
    """All that is imported with a module."""
    found, left = set(), [name]
    while left:
        new = NEEDS[left.pop()] - found
        found |= new
        left += new
    return found


def test_no_two_modules_have_one_name():
    count = collections.Counter(name.rpartition(".")[2] for name in PATHS)
    assert [name for name, times in count.items() if times > 1] == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_about_a_dozen_modules(room):
    modules = [name for name in PATHS if name.rpartition(".")[0] == room and name not in ROOMS]
    assert len(modules) <= A_DOZEN, sorted(modules)


def test_a_function_has_at_most_eight_arguments():
    found = {
        place
        for name, tree in TREES.items()
        for place, node in functions(tree, name)
        if arguments(node) > EIGHT
    }
    assert found == MORE


def test_no_import_within_a_function_hides_a_circle():
    """What is imported late is imported late because it is heavy: it would not import the module that asks for it."""
    circles = []
    for name, tree in TREES.items():
        for _, node in functions(tree, name):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Import | ast.ImportFrom):
                    late = imported(inner) - {room for room in ROOMS if name.startswith(room)}
                    circles += [
                        f"{name}:{inner.lineno}: {one}" for one in late if name in reached(one) | {one}
                    ]
    assert circles == []


def test_names_that_a_room_loads_late_are_of_the_module_that_has_them():
    (node,) = ast.parse("from marl_jax.runs import train").body
    assert imported(node) == {"marl_jax", "marl_jax.runs", "marl_jax.runs.loop"}


def test_work_beside_the_main_thread_is_done_by_workers():
    threads = {"Thread", "Timer", "ThreadPoolExecutor", "ThreadPool", "start_new_thread"}
    found = {
        f"{name}:{node.lineno}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        for word in (getattr(node, "attr", ""), getattr(node, "id", ""))
        if word in threads and name != "marl_jax.threads"
    }
    assert found == set()


def test_tests_lie_as_the_rooms_do():
    rooms = {room.removeprefix("marl_jax").replace(".", "/").lstrip("/") for room in ROOMS}
    folders = {
        path.parent.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")
    }
    assert folders - {".", "recipes"} <= rooms
