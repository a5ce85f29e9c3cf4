"""Files that come with the package: cells, micro bases, the mains of the commands, pages and examples.

In a clone they lie beside `marl_jax/`; a wheel holds them inside, as `marl_jax/_configs` and so on (pyproject.toml).
`docs` is the folder that the README, docs/ and examples/ lie in, so that links between them hold in both.
"""

import os
from pathlib import Path

HOME = Path(__file__).parent
IN_A_CLONE = {"configs": "configs", "experiments": "experiments", "docs": ""}
BROUGHT = tuple(f"_{name}" for name in IN_A_CLONE)  # folders of a wheel that hold no code of the library


def packaged(name: str) -> Path:
    """The folder of that name, in a wheel or in a clone."""
    inside = HOME / f"_{name}"
    return inside if inside.is_dir() else HOME.parent / IN_A_CLONE[name]


def located(path: str | os.PathLike[str]) -> Path:
    """The file or folder of that name; a missing one below `configs/` is looked up in the package."""
    given = Path(os.path.expanduser(path))
    if given.exists() or given.parts[:1] != ("configs",):
        return given
    inside = packaged("configs").joinpath(*given.parts[1:])
    return inside if inside.exists() else given


def config_file(name: str) -> Path | None:
    """The file of cells with that path, or the packaged one with that stem, such as `micro`; None: neither."""
    for path in (located(name), packaged("configs") / f"{name}.py"):
        if path.is_file():
            return path
    return None


def config_names() -> list[str]:
    """The stems of the packaged files of cells."""
    return sorted(path.stem for path in packaged("configs").glob("*.py"))
