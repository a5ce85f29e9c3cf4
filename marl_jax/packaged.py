"""Files that come with the package: cells, micro bases, the mains of the commands, pages and examples.

In a clone they are next to `marl_jax/`; in a wheel they are inside of it, as `marl_jax/_configs` and so on
(pyproject.toml). `docs` is the folder that contains the README, docs/ and examples/, so that links between them work.
"""

import os
from pathlib import Path

HOME = Path(__file__).parent
IN_A_CLONE = {"configs": "configs", "experiments": "experiments", "docs": ""}
# Folders in a wheel that contain no code of the library.
PACKAGED_FOLDERS = tuple(f"_{name}" for name in IN_A_CLONE)


def packaged(name: str) -> Path:
    """The path of a packaged folder (a key of IN_A_CLONE), in a wheel or in a clone."""
    inside = HOME / f"_{name}"
    return inside if inside.is_dir() else HOME.parent / IN_A_CLONE[name]


def resolve_path(path: str | os.PathLike[str]) -> Path:
    """The file or folder at this path; a missing one below `configs/` is looked up in the package."""
    local = Path(os.path.expanduser(path))
    if local.exists() or local.parts[:1] != ("configs",):
        return local
    inside = packaged("configs").joinpath(*local.parts[1:])
    return inside if inside.exists() else local


def config_file(name: str) -> Path | None:
    """The file of cells at that path, else the packaged one with that stem, such as `micro`, else None."""
    for path in (resolve_path(name), packaged("configs") / f"{name}.py"):
        if path.is_file():
            return path
    return None


def config_names() -> list[str]:
    """The stems of the packaged files of cells."""
    return sorted(path.stem for path in packaged("configs").glob("*.py"))
