"""Scripts in this process: a fresh one would take most of its time to load JAX."""

import runpy
import sys
from pathlib import Path

import pytest
from absl import flags

ROOT = Path(__file__).parents[1]
SCRIPTS = (
    "experiments.",
    "recipes.",
    str(ROOT / "experiments"),
)  # owners of flags: modules, and files that are run


def run(module, *arguments):
    """`python -m MODULE ARGUMENTS` from the root of the repository; its exit code."""
    # Those of a script that runs this one are put aside.
    outer = [
        (_owner(name), name, flags.FLAGS[name]) for name in flags.FLAGS if _owner(name).startswith(SCRIPTS)
    ]
    for _, name, _ in outer:
        delattr(flags.FLAGS, name)
    before = set(flags.FLAGS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", [module, *map(str, arguments)])
        patch.setenv("XLA_FLAGS", "")
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
            return 1 if isinstance(ended.code, str) else ended.code or 0
        finally:
            for name in set(flags.FLAGS) - before:  # another script defines its own of that name
                owner = _owner(name)
                if owner not in sys.modules:  # not of a library
                    delattr(flags.FLAGS, name)
            for owner, name, flag in outer:
                flags.FLAGS[name] = flag
                flags.FLAGS.register_flag_by_module(owner, flag)
    return 0


def _owner(name):
    return flags.FLAGS.find_module_defining_flag(name) or ""
