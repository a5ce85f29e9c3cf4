"""Run folders as training leaves them, whose policies say what they are told to: golds follow without any model.

A policy of `says("12")` writes \\boxed{1} or \\boxed{2}, each as often: the next token follows from the last one
alone, through the output head, and attention and MLP add nothing.
"""

import contextlib

import jax
import numpy as np

from marl_jax.config.run_config import load_config
from marl_jax.models import ModelConfig, init, save_hf
from marl_jax.models.tokenizer import build_micro_tokenizer
from marl_jax.run_folder.checkpoints import Checkpoints
from marl_jax.run_folder.folder import begin, open_folder
from marl_jax.runs.loading.parts import digests, load_parts, load_tasks
from marl_jax.runs.loading.play import planned_engine, settled_form
from marl_jax.tasks import Task

TOKENIZER = build_micro_tokenizer()
MODEL = ModelConfig(
    vocab_size=len(TOKENIZER),
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    tie_word_embeddings=False,
    max_position_embeddings=1024,
)
SIZES = {"train": 4, "val": 6, "test": 8}


def questions(split):
    """A data set: the answer is always 1."""
    return [Task(f"{split}/{i}", "math", f"{i}*{i}=?", gold="1") for i in range(SIZES[split])]


def says(digits, config=MODEL):
    """Weights of a policy."""
    params = jax.tree.map(np.array, init(0, config))
    for silent in ("o", "down"):
        params["layers"][silent] *= 0
    follow = {"\n": ["\\boxed"], "\\boxed": ["{"], "{": list(digits), "}": ["<|im_end|>"]}
    follow |= {digit: ["}"] for digit in digits}
    ids = TOKENIZER.convert_tokens_to_ids
    embed, head = np.zeros_like(params["embed"]), np.zeros_like(params["lm_head"])
    embed[:, 0] = 1  # what is not in the chain looks all alike
    for i, (token, nexts) in enumerate(follow.items(), 1):
        embed[ids(token)] = np.eye(config.hidden_size)[i]
        head[i, ids(nexts)] = 5
    return jax.tree.map(jax.numpy.asarray, {**params, "embed": embed, "lm_head": head})


def make_base(directory, params=None, config=MODEL):
    save_hf(directory, config, says("12") if params is None else params, TOKENIZER)
    return directory


def make_run(workdir, base, saved=None, cell="voting-isolated-xs-math", scores=None, settled=True, **changes):
    """A folder that holds checkpoints `saved`: {step: {policy: tree}}. `changes` are fields, as in data__name."""
    fixed = {
        "policies__base": base,
        "data__name": "stored_run:questions",
        "engine__lanes": 16,
        "engine__max_prompt": 320,
        "sampling__max_new_tokens": 8,
    }
    texts = [(name.replace("__", "."), str(value)) for name, value in (fixed | changes).items()]
    config = load_config(f"configs/micro.py:{cell}", texts)
    parts = load_parts(config)
    splits = {split: load_tasks(config.data, split) for split in ("train", "val")}
    with open_folder(workdir) as folder:
        shapes = settled_form(planned_engine(config, parts)) if settled else {}
        begin(folder, config, digests(config, parts, splits), lambda: shapes)
        with contextlib.closing(Checkpoints(folder / "checkpoints", latest=10)) as store:
            start = parts.start(config.seed)
            for step, trees in (saved or {}).items():
                arrays = {"policies": {name: trees.get(name, start[name]) for name in parts.trained}}
                numbers = {"step": step, "updates": dict.fromkeys(parts.trained, step)}
                store.save(step, {**arrays, "learner": {}}, numbers, (scores or {}).get(step))
    return workdir
