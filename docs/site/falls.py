"""The figure of docs/findings-falls.md: rewards, and the lengths of the generator's updates, of the runs that fell.

python docs/site/falls.py
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from marl_jax.alarms.watch import judge

ROOT = Path(__file__).parents[2]
FELL = {  # in the order of the page; and what is written above each
    "+rate6/seed-0": "clean, seed 0",
    "+rate6+equalise/seed-2": "equalise, seed 2",
    "+rate6+anchor/seed-0": "anchor, seed 0",
    "+rate6+anchor/seed-1": "anchor, seed 1",
    "+rate6+anchor+clip/seed-0": "anchor and clip, seed 0",
}


def main() -> None:
    """Draw docs/findings-falls.svg."""
    runs = json.loads((ROOT / "results" / "falls.json").read_text())
    with plt.style.context(ROOT / "marl_jax" / "study" / "report" / "drawing.mplstyle"):
        figure, axes = plt.subplots(2, len(FELL), figsize=(11, 3.6), sharex=True, sharey="row")
        for (name, title), (above, below) in zip(FELL.items(), axes.T, strict=True):
            run = runs[f"voting-isolated-xs-math{name}"]
            steps, update = range(1, len(run["update"]) + 1), run["update"]
            above.plot(steps, run["reward"], color="#3b6ea5", linewidth=1)
            below.plot(steps, update, color="#b4532a", linewidth=1)
            alarms = judge(
                {"step": step, "policy/p0/update_norm": length, "policy/p0/learning_rate": 1.0}
                for step, length in zip(steps, update)
            ).alarms
            for axis in (above, below):
                for jolt in alarms:
                    axis.axvline(jolt.step, color="#777777", linewidth=0.8, linestyle=":")
            above.set_title(title, fontsize=9)
            below.set_xlabel("step")
        axes[0, 0].set_ylabel("share right")
        axes[1, 0].set_ylabel("length of the update")
        axes[1, 0].set_ylim(0, 0.3)
        figure.tight_layout()
        figure.savefig(ROOT / "docs" / "findings-falls.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
