"""The notebook of an example: its script, cell by cell. `python tests/notebook.py` writes it anew."""

import ast
import json
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
LAST = "trees = train(steps=2, problems=8)"  # on the base that the package has, wherever the notebook lies


def notebook_of(source):
    """Words, imports, functions and a call of `train`; the last lines of a script are for the command line."""
    tree = ast.parse(source)
    words, *rest = tree.body
    parts = [node for node in rest if not isinstance(node, ast.If)]
    imports = [node for node in parts if isinstance(node, ast.Import | ast.ImportFrom)]
    functions = [ast.get_source_segment(source, node) for node in parts if node not in imports]
    lines = [ast.get_source_segment(source, node) for node in imports if ast.unparse(node) != "import sys"]
    cells = [_cell("markdown", ast.literal_eval(words.value).strip())]
    cells += [_cell("code", text) for text in ("\n".join(lines), *functions, LAST)]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _cell(kind, text):
    code = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True), **code}


if __name__ == "__main__":
    made = notebook_of((EXAMPLES / "own_loop.py").read_text())
    (EXAMPLES / "own_loop.ipynb").write_text(json.dumps(made, indent=1) + "\n")
