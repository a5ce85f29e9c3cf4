"""A new project for the user, copied from `examples/project`."""

import os
import shutil
from pathlib import Path

from marl_jax.errors import UserError
from marl_jax.packaged import packaged


def new_project(directory: str | os.PathLike[str]) -> str:
    """Write the project into an empty or new folder; returns a text that says what to do with it."""
    if not os.fspath(directory):
        raise UserError("the folder is missing: marl-jax new DIR")
    path = Path(os.path.expanduser(directory))
    try:
        path.mkdir(parents=True, exist_ok=True)
        if present := sorted(entry.name for entry in path.iterdir()):
            raise UserError(f"'{directory}' holds {present[0]}: give a folder that is empty, or a new one")
        project = packaged("docs") / "examples" / "project"
        names = sorted(file.name for file in project.iterdir() if file.is_file())
        for name in names:
            shutil.copyfile(project / name, path / name)
    except OSError as error:
        raise UserError(f"'{directory}' cannot be written ({error.strerror}): choose another") from None
    return f"{', '.join(names)}: in '{path}'; its README.md says how to test, try and train it"
