"""How full are lanes of several cache lengths in a step, and how many tokens are computed again?

    python -m benchmarks.lanes [--cell=CELL] [--device=H100] [--completion=mean:0.5,sigma:0.6] [--lengths=RUN] ...

The workflow makes all calls of a step of a cell of configs/qwen3.py, with completions of the given lengths, and they
are replayed through the admission of the engine that a run has on the device; no model computes. The lanes are those
of a run, which are planned for `mean:0.5,sigma:0.6`. Minutes are for decoding at 60% of the device's bandwidth, and
`at_least` for an engine that reads only filled parts of the lanes' caches. Prints one JSON object on the last line.
"""

import json
from typing import Any

from absl import app, flags

from marl_jax.config.run_config import RunConfig, load_config
from marl_jax.models.decode import cache_bytes
from marl_jax.planning import memory
from marl_jax.planning.devices import KINDS
from marl_jax.planning.lengths import Lengths, read_lengths, recorded_lengths
from marl_jax.planning.occupancy import occupancy
from marl_jax.planning.plan import demand_of, episodes_of, find_models, make_plan

FLAGS = flags.FLAGS
flags.DEFINE_string("cell", "voting-isolated-0.6b-math", "of configs/qwen3.py, of policies on one model")
flags.DEFINE_enum("device", "H100", [device.name for device in KINDS], "that lanes are counted for")
flags.DEFINE_multi_string("completion", ["mean:0.5,sigma:0.6"], "lengths, as `experiments.plan` takes them")
flags.DEFINE_multi_string("lengths", [], "runs whose recorded completions say how long calls are")


def main(_: list[str]) -> None:
    config = load_config(f"configs/qwen3.py:{FLAGS.cell}")
    chosen = {text: read_lengths(text) for text in FLAGS.completion}
    chosen |= {folder: recorded_lengths(folder, Lengths()) for folder in FLAGS.lengths}
    report = {"cell": FLAGS.cell, "device": FLAGS.device}
    for text, lengths in chosen.items():
        report[text] = found = counted(config, lengths)
        print(text, json.dumps(found), flush=True)
    print(json.dumps(report))


def counted(config: RunConfig, lengths: Lengths) -> dict[str, Any]:
    """Statistics of the lanes in the replay of a step; every policy's engine has as many."""
    models, _ = find_models(config)
    model = next(iter(models.values()))
    device = next(device for device in KINDS if device.name == FLAGS.device)
    (engine,) = make_plan(config, models, device).each_shape
    demand = demand_of(config, lengths, problems=config.data.problems)
    most = {role: own.max_new_tokens for role, own in config.role_settings.items()}
    episodes = episodes_of(demand.calls, most, engine)
    out = occupancy(engine, episodes, memory.look_ahead(config, engine.lanes))
    a_token = cache_bytes(model, 1, 1)
    weights = next(iter(memory.sizes_of(config, models, device).values())).weights
    filled = sum(
        call.new * (len(call.prompt) + call.new / 2) for waves in episodes for wave in waves for call in wave
    )
    read = engine.steps * (out.attended * a_token + out.dispatches * weights)
    minutes = lambda moved: round((device.seconds(0.0, moved, model.dtype) or 0.0) / 60, 1)
    return {
        "lanes": engine.lanes,
        "episodes": len(episodes),
        "in_use": round(out.in_use, 3),
        "in_use_while_calls_wait": round(out.in_use_busy, 3),
        "recomputed": round(out.recomputed / out.sampled, 4),
        "filled": round(filled / (engine.steps * out.attended), 3),
        "minutes": minutes(read),
        "at_least": minutes(filled * a_token),
    }


if __name__ == "__main__":
    app.run(main)
