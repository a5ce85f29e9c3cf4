"""Every module says what it offers, and everything that it offers says what it is; read from the text of the code."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "marl_jax").rglob("*.py"))
REFERENCE = {
    name
    for page in (ROOT / "docs/reference").glob("*.md")
    for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
}
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public(body):
    """The functions and classes of a module or class that are not private."""
    return [node for node in body if isinstance(node, DEFINITIONS) and not node.name.startswith("_")]


def last_name(mark):
    """`setter` of the decorator `@position.setter`."""
    return ast.unparse(mark).rpartition(".")[2]


def bound(tree):
    """All names that a module has at its top level."""
    for node in tree.body:
        if isinstance(node, DEFINITIONS):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (
                name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
            )
        elif isinstance(node, ast.If):  # imports for type checkers, of what is loaded when it is asked for
            yield from bound(node)


def offered(tree):
    """The value of `__all__`; None where there is none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return None


@pytest.mark.parametrize("module", MODULES)
def test_a_room_names_what_it_offers_and_a_module_offers_what_has_no_underscore(module):
    tree = ast.parse((ROOT / module).read_text())
    assert ast.get_docstring(tree)
    names, room = offered(tree), module.endswith("__init__.py")
    assert set(names or ()) <= set(bound(tree))
    if module not in (
        "marl_jax/commands/cli.py",
        "marl_jax/config/run_config.py",
    ):  # they pass on names of others
        assert names is None if not room else names is not None or not public(tree.body)


@pytest.mark.parametrize("module", MODULES)
def test_public_functions_and_classes_have_docstrings(module):
    nodes = public(ast.parse((ROOT / module).read_text()).body)
    nodes += [method for node in nodes if isinstance(node, ast.ClassDef) for method in public(node.body)]
    silent = [f"{module}:{node.lineno}: {node.name}" for node in nodes if not ast.get_docstring(node)]
    setters = {
        f"{module}:{n.lineno}: {n.name}" for n in nodes if "setter" in map(last_name, n.decorator_list)
    }
    assert set(silent) <= setters


@pytest.mark.parametrize("module", [m for m in MODULES if m[:-3].replace("/", ".") in REFERENCE])
def test_fields_of_the_reference_have_a_comment(module):
    lines = (ROOT / module).read_text().splitlines()
    for node in public(ast.parse("\n".join(lines)).body):
        if not isinstance(node, ast.ClassDef) or not any(
            "dataclass" in ast.unparse(mark) for mark in node.decorator_list
        ):
            continue
        for field in node.body:
            if isinstance(field, ast.AnnAssign):
                behind = "  # " in lines[field.end_lineno - 1]
                above = lines[field.lineno - 2].lstrip().startswith("# ")
                assert behind or above, f"{module}:{field.lineno}: {node.name}.{field.target.id}"
