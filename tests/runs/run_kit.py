"""Tiny runs, what they leave, and whether two of them are the same."""

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_run import KINDS, tiny_config

from marl_jax.run_folder.checkpoints import restore
from marl_jax.run_folder.folder import differences
from marl_jax.run_folder.json_lines import read_lines
from marl_jax.runs import loop
from marl_jax.runs.loading.parts import load_parts
from marl_jax.terminal.live import Live

SCRIPT = Path(__file__).with_name("tiny_run.py")


def quiet(steps=8):
    return Live(steps, ("generator", "aggregator"), io.StringIO())


def run(base, workdir, **changes):
    return loop.train(tiny_config(base, **changes), workdir, live=quiet())


def weights(workdir, which="latest", kind="plain"):
    """Every array of a checkpoint, as bytes by file-independent path."""
    base = json.loads((Path(workdir) / "config.json").read_text())["config"]["policies"]["base"]
    parts = load_parts(KINDS[kind](tiny_config(base)))
    templates = {"policies": {name: parts.start(0)[name] for name in parts.trained}}
    trees, data = restore(Path(workdir) / "checkpoints", which, templates)
    leaves = jax.tree_util.tree_flatten_with_path(trees)[0]
    return data["step"], {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


def records(workdir):
    workdir = Path(workdir)
    lines = read_lines(workdir / "metrics.jsonl")
    same = [{name: line[name] for name in line if not name.startswith("time/")} for line in lines]
    return same, list(read_lines(workdir / "eval.jsonl"))


def same(workdir, whole, kind="plain"):
    """Two runs have the same numbers and weights; each seed of a run of several has a folder."""
    seeds = sorted(folder.name for folder in Path(whole).glob("seed-*"))
    for seed in seeds:
        same(Path(workdir) / seed, Path(whole) / seed, kind)
    if seeds:
        return
    assert records(whole)[0], f"{whole} has no step"
    for name, mine, theirs in zip(("metrics", "eval"), records(workdir), records(whole)):
        assert [line["step"] for line in mine] == [line["step"] for line in theirs], name
        for one, other in zip(mine, theirs):
            none_of(differences(other, one), f"{name}, step {one['step']}")
    (step, mine), (last, theirs) = weights(workdir, kind=kind), weights(whole, kind=kind)
    assert step == last
    none_of([path for path in mine | theirs if mine.get(path) != theirs.get(path)], "weights")


def none_of(lines, what):
    """Nothing differs; if it does, what does is named, in few lines."""
    if lines:
        pytest.fail("\n  ".join([f"{what}: {len(lines)} differ", *lines[:8]]))


def in_a_process(base, workdir, *options, dies_after=None, **environment):
    """(exit status, what it said, when it ended) of a run that is killed if it lives longer than so many seconds."""
    log = workdir.with_suffix(".log")  # a pipe might be held open by what outlives the process
    command = [sys.executable, SCRIPT, base, workdir, *options]
    with open(log, "w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, "JAX_PLATFORMS": "cpu", **environment}
        )
        try:
            process.wait(600 if dies_after is None else dies_after)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return process.returncode, log.read_text(), time.time()
