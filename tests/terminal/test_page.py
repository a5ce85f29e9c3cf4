"""The page that a run begins with says what will happen, to whom, and where it is written."""

import dataclasses
import re
from pathlib import Path

import pytest
from plan_kit import of_all, plan_of

from marl_jax.config.run_config import load_config
from marl_jax.models import ModelConfig
from marl_jax.planning.devices import KINDS, Device
from marl_jax.sampling.shapes import EngineSettings
from marl_jax.terminal.page import page, plan_page

DEVICE = Device("CPU", "cpu", 8 << 30, bandwidth=1e10, bfloat16=1e11, float32=1e11)
TASKS = {"train": 12704, "val": 256}
SETTLED = EngineSettings((96, 48), (128, 640), chunks=(64,), prefill_tokens=640, prefixes=8)


@pytest.fixture(autouse=True)
def no_step_was_measured(monkeypatch, tmp_path):
    """Other tests train here, and a plan goes by their steps where there are any."""
    monkeypatch.setenv("MARL_JAX_CACHE", str(tmp_path))


def text_of(
    cell="configs/micro.py:voting-isolated-s-math", scale="s", device=DEVICE, engine=SETTLED, **overrides
) -> str:
    config = load_config(cell, [(key.replace("__", "."), value) for key, value in overrides.items()])
    model = ModelConfig.preset(scale)
    plan = plan_of(config, model, device)
    return page(
        config,
        of_all(config, model),
        folder=Path("/runs/a"),
        tasks=TASKS,
        engine={config.policies.base: engine},
        plan=plan,
    )


def line(text: str, label: str) -> str:
    """The entry of a label, its continued lines joined."""
    entries = text.replace("\n" + " " * 14, " ").splitlines()
    return next(entry.removeprefix(label).strip() for entry in entries if entry.startswith(label))


@pytest.mark.parametrize(
    ("cell", "scale"),
    [
        ("configs/micro.py:voting-isolated-s-math", "s"),
        ("configs/micro.py:single-shared-xs-code", "xs"),
        pytest.param("configs/qwen3.py:orch_workers-isolated-4b-code", "4b", marks=pytest.mark.long),
        pytest.param("configs/qwen3.py:eval_opt-shared-0.6b-math", "0.6b", marks=pytest.mark.long),
    ],
)
def test_it_is_one_page_of_a_terminal(cell, scale):
    text = text_of(cell, scale)
    assert len(text.splitlines()) <= 36
    assert max(map(len, text.splitlines())) <= 80
    assert text == text.rstrip() and "\t" not in text


def test_it_says_what_is_trained_and_for_how_long():
    text = text_of()
    assert line(text, "cell").startswith("voting-isolated-s-math: workflow voting on micro_math")
    assert line(text, "model") == "385.1k parameters, float32, from configs/bases/micro-s"
    assert "generator -> p0: 385.1k trainable" in text and "aggregator -> p1: 385.1k trainable" in text
    assert line(text, "problems") == "train 12,704, val 256"
    assert line(text, "step ").startswith("64 problems x 8 episodes = 512 episodes; up to 64 new tokens")
    assert line(text, "steps") == "200, evaluated every 10 on 64 problems of val"
    assert line(text, "optimiser") == "adamw, learning rate 0.0003 constant"
    assert line(text, "written to").startswith("/runs/a: config.json, metrics.jsonl, eval.jsonl")


def test_it_says_how_many_problems_are_played_where_val_has_fewer(monkeypatch):
    monkeypatch.setitem(TASKS, "val", 40)
    assert line(text_of(), "steps").endswith("on all 40 problems of val (evaluation.problems is 64)")


def test_adapters_frozen_roles_and_shared_policies_are_named():
    text = text_of(policies__frozen_roles="aggregator")
    assert "aggregator (frozen) -> p1: frozen, served only" in text
    text = text_of("configs/qwen3.py:voting-shared-0.6b-math", "0.6b")
    # 28 layers x rank 64 x (inputs + outputs of seven matrices)
    per_rank = 2 * (1024 + 2048) + 2 * (1024 + 1024) + 3 * (1024 + 3072)
    assert f"generator, aggregator -> p0: {28 * 64 * per_rank / 1e6:.1f}M trainable (LoRA, rank 64)" in text
    assert line(text, "optimiser") == "adamw, learning rate 2e-05 cosine to step 500, 15 steps of warm-up"


def test_a_phase_says_what_it_begins_with_and_what_it_is_compared_with():
    phases = (
        '[{"steps": 5, "start": "base", "copies": {"p1": "p0"}, "reference": "start", "objective": "dpo"}]'
    )
    line = "1: 5 steps of everything, dpo, from base, p1 from p0, reference start"
    assert line in " ".join(text_of(phases=phases).split())


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({}, "grpo, calls compared with those of the same task and role"),
        (
            {"advantages__group": "study"},
            "grpo, calls compared with those of the same task and role and slot",
        ),
        (
            {"advantages__estimator": "rloo", "advantages__group": "task"},
            "rloo, calls compared with those of the same task",
        ),
        ({"advantages__estimator": "agent"}, "agent-wise: mean per role, scale per role, of each task"),
    ],
)
def test_the_groups_of_the_advantage_are_said_in_words(overrides, says):
    assert line(text_of(**overrides), "advantages") == says


def test_memory_and_time_are_those_of_the_plan():
    config = load_config("configs/micro.py:voting-isolated-s-math")
    plan = plan_of(config, ModelConfig.preset("s"), DEVICE)
    memory = line(text_of(), "memory")
    assert f"{plan.total / 2**30:.1f} GiB at the peak (gradient) of 8.0 GiB that CPU has free" in memory
    assert f"caches of the lanes {256 * 512 * 4 * 2 * 64 * 4 * 2 / 2**20:.1f} MiB" in memory  # two engines
    assert memory.index(plan.at_peak[0].name) < memory.index(plan.at_peak[1].name)
    assert line(text_of(), "engine") == "2 engines, each of 96 lanes of 640 tokens"
    rungs = dataclasses.replace(SETTLED, widths=(96,), lanes_at=(80, 16))
    said = "2 engines, each of 96 lanes over rungs: 80 of 128, 16 of 640 tokens"
    assert line(text_of(engine=rungs), "engine") == said
    time = line(text_of(), "time")
    assert time.startswith(f"about {sum(plan.seconds.values()):.1f} s per step (prefill ")
    assert "without grading and compilation" in time and "50% of max_new_tokens" in time
    unknown = dataclasses.replace(KINDS[0], name="NVIDIA L4", bandwidth=0.0, bfloat16=0.0, float32=0.0)
    assert "not known for NVIDIA L4" in line(text_of(device=unknown), "time")


@pytest.mark.parametrize(
    "cell",
    [
        "configs/micro.py:voting-isolated-s-math",
        pytest.param("configs/qwen3.py:orch_workers-isolated-4b-code", marks=pytest.mark.long),
    ],
)
def test_the_plan_fits_a_terminal_of_80_columns_and_breaks_no_word(cell):
    config = load_config(cell)
    model = ModelConfig.preset(cell.split("-")[2])
    plans = [plan_of(config, model, device) for device in (*KINDS, DEVICE)]
    text = plan_page(config, of_all(config, model), "configs/bases/micro-s", plans)
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    for plan in plans:  # whole names, and every device has its verdict
        assert f"{plan.device.name} {'fits' if plan.fits else 'does not fit'}: " in words


@pytest.mark.parametrize(("rank", "told"), [(64, True), (4, False)])
def test_adapters_larger_than_the_model_are_told_with_a_rank_that_is_not(rank, told):
    text = " ".join(text_of(policies__train="lora", policies__lora_rank=rank).split())
    assert ("more than the 385.1k of the model itself: lower --config.policies.lora_rank to" in text) is told
    if told:
        lower = int(re.search(r"lora_rank to (\d+)", text)[1])
        assert "of the model itself" not in text_of(policies__train="lora", policies__lora_rank=lower)
