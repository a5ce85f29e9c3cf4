"""Assert-style tests (MBPP, HumanEval) as tests of `run_program`.

Code of asserts `f(args) == literal` alone becomes call tests, which are compared outside the sandbox; any other code
becomes one check test.
"""

import ast
import builtins
import symtable
import sys
from collections.abc import Sequence
from typing import Any


def assert_tests(code: str, entry_point: str | None = None, setup: str = "") -> list[dict[str, Any]]:
    """Tests from assert statements, or, if the entry point is named, from code that defines `check(candidate)`.

    `setup` is code that the asserts use: it runs in the asserts' process, never in the program's.
    """
    try:
        calls = _call_tests(ast.parse(code).body, entry_point)
        defined_elsewhere = (_defined(setup) | (_PYTHON if entry_point else set())) - {entry_point}
    except SyntaxError as error:
        raise ValueError(f"the test code is not Python: {error}") from None
    if calls is None or any(test["call"] in defined_elsewhere for test in calls):
        return [check_test(code, entry_point, setup)]
    return calls


def check_test(code: str, entry_point: str | None = None, setup: str = "") -> dict[str, Any]:
    """The code as one test, which calls the `check` that it defines."""
    if entry_point is not None and "check" in _defined(code):
        code = f"{code}\n\ncheck({entry_point})\n"
    functions = {} if entry_point is None else {"functions": [entry_point]}
    return {"check": code, **({"setup": setup} if setup else {}), **functions}


def free_functions(code: str, setup: str = "") -> tuple[str, ...]:
    """The names that test code uses but neither it, nor its setup, nor Python defines: the program's functions."""
    known = _defined(code) | _defined(setup) | _PYTHON
    return tuple(sorted((_used(code) | _used(setup)) - known))


def check_functions(functions: Sequence[str], code: str, setup: str = "") -> None:
    """ValueError if test code calls an undefined function, or if no program can pass it, or if every program can."""
    if not functions:
        raise ValueError("the check uses no function of the program: any program would pass")
    parts = [ast.parse(code), ast.parse(setup)]
    nodes = [node for part in parts for node in ast.walk(part)]
    if foreign := sorted(_imported(parts) - sys.stdlib_module_names):
        raise ValueError(f"the check imports {', '.join(foreign)}, and there is only the standard library")
    if _runs_unittest(nodes):
        raise ValueError("the check calls unittest.main, which exits or hides what failed: call the tests")
    if _ignores_results(nodes):
        raise ValueError(
            "the check runs tests and reads no result, so that any program would pass: call the tests"
        )
    if all(map(_only_defines, parts[0].body)):
        raise ValueError("the check defines its tests and calls none of them")
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    if names & _HIDE_NAMES or any(isinstance(node, ast.alias) and node.name == "*" for node in nodes):
        return  # the code may define names that its source does not show
    used = _used(code) | _used(setup)
    if not used & set(functions):
        raise ValueError(f"the check uses none of its functions {list(functions)}: any program would pass")
    called = {
        node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    for name in sorted(called.intersection(free_functions(code, setup)) - set(functions)):
        raise ValueError(f"the check calls {name}, which is not defined in it, its setup or functions")


_RESULTS = {"wasSuccessful", "failures", "errors", "failed", "unexpectedSuccesses"}
_DOCTESTS = {"testmod", "testfile", "run_docstring_examples"}
_RUNNERS = {"TextTestRunner", "TestSuite", "TestLoader", "defaultTestLoader", "makeSuite"}
_RUNNERS |= {"DocTestSuite", "DocTestRunner"}
_PYTHON = {*dir(builtins), "__file__", "__builtins__"}
_HIDE_NAMES = {"exec", "eval", "globals", "locals", "vars", "__import__", "__builtins__"}


def _call_tests(body: Sequence[ast.stmt], entry_point: str | None) -> list[dict[str, Any]] | None:
    """The statements as call tests; None if one of them is anything else."""
    tests: list[dict[str, Any]] = []
    for statement in body:
        match statement:
            case ast.Expr(ast.Constant()) | ast.Pass() | ast.Assert(test=ast.Constant(value=True)):
                continue
            case ast.Assign(targets=[ast.Name(id="METADATA")]):
                continue
            case ast.FunctionDef(name="check", args=ast.arguments(args=[ast.arg(arg=candidate)])) if (
                entry_point
            ):
                inner = _call_tests(statement.body, None)
                if inner is None or any(test["call"] not in (candidate, entry_point) for test in inner):
                    return None
                tests.extend({**test, "call": entry_point} for test in inner)
            case ast.Assert(
                test=ast.Compare(
                    left=ast.Call(func=ast.Name(id=name), args=args, keywords=[]),
                    ops=[op],
                    comparators=[right],
                )
            ) if isinstance(op, ast.Eq) or (isinstance(op, ast.Is) and isinstance(right, ast.Constant)):
                try:
                    values = [ast.literal_eval(arg) for arg in args]
                    tests.append({"call": name, "args": values, "expected": ast.literal_eval(right)})
                except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                    return None
            case _:
                return None
    return tests or None


def _imported(parts: Sequence[ast.Module]) -> set[str]:
    """The modules that code imports at its top level."""
    statements = [statement for part in parts for statement in part.body]
    names = [alias.name for part in statements if isinstance(part, ast.Import) for alias in part.names]
    names += [part.module or "." for part in statements if isinstance(part, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def _runs_unittest(nodes: Sequence[ast.AST]) -> bool:
    """Whether unittest.main is called, by whatever name, and nothing reads its result."""
    names = set[str]()
    for node in nodes:
        match node:
            case ast.Import(names=aliases):
                names |= {f"{it.asname or it.name}.main" for it in aliases if it.name == "unittest"}
            case ast.ImportFrom(module="unittest", names=aliases):
                names |= {it.asname or it.name for it in aliases if it.name == "main"}
    read = {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr == "result"}
    calls = (node for node in nodes if isinstance(node, ast.Call) and id(node) not in read)
    return any(ast.unparse(node.func) in names for node in calls)


def _ignores_results(nodes: Sequence[ast.AST]) -> bool:
    """Whether the code runs unittest or doctest as a statement, which raises nothing, and reads no result."""
    if any(isinstance(node, ast.Attribute) and node.attr in _RESULTS for node in nodes):
        return False
    runners, words_of = set(_RUNNERS), dict[str, set[str]]()
    for node in nodes:
        match node:
            case ast.ClassDef(bases=bases) if any("TestResult" in ast.unparse(it) for it in bases):
                return False  # it may raise a failure that is reported to it
            case ast.ClassDef(name=name, bases=bases) if any("TestCase" in ast.unparse(it) for it in bases):
                runners.add(name)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                words_of[name] = _words(value)
    for node in nodes:
        match node:
            case ast.Expr(ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), keywords=keywords)) if (
                name in _DOCTESTS and not any(keyword.arg == "raise_on_error" for keyword in keywords)
            ):
                return True
            case ast.Expr(ast.Call(func=ast.Attribute(value=runner, attr="run") | (ast.Call() as runner))):
                if runners & _words(runner).union(*(words_of.get(word, ()) for word in _words(runner))):
                    return True
            case ast.Expr(ast.Call(func=ast.Name(id=name))) if runners & words_of.get(name, set()):
                return True
    return False


def _words(node: ast.AST) -> set[str]:
    """All names in an expression, also those of attributes."""
    nodes = [*ast.walk(node)]
    attributes = {part.attr for part in nodes if isinstance(part, ast.Attribute)}
    return attributes | {part.id for part in nodes if isinstance(part, ast.Name)}


def _only_defines(statement: ast.stmt) -> bool:
    """Whether a statement runs no code of its body."""
    match statement:
        case ast.FunctionDef(decorator_list=marks) | ast.AsyncFunctionDef(decorator_list=marks):
            return all(isinstance(mark, ast.Name) and mark.id in dir(builtins) for mark in marks)
        case ast.ClassDef(decorator_list=[]):
            return all(map(_only_defines, statement.body))
        case ast.Assign() | ast.AnnAssign():
            return not any(isinstance(node, ast.Call) for node in ast.walk(statement))
    return isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _defined(code: str) -> set[str]:
    top = symtable.symtable(code, "test", "exec")
    return {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}


def _used(code: str) -> set[str]:
    """The global names that code reads, also in functions and classes."""
    tables = [symtable.symtable(code, "test", "exec")]
    for table in tables:
        tables.extend(table.get_children())
    symbols = ((symbol, table.get_type() == "module") for table in tables for symbol in table.get_symbols())
    return {it.get_name() for it, top in symbols if it.is_referenced() and (top or it.is_global())}
