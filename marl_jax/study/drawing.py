"""Panels as pictures: inline SVG in the colours of the page, light or dark, and one PNG on white.

Lines are labelled where they end, with the value they end at. Matplotlib loads when something is drawn; nothing here
reads a run.
"""

import contextlib
import html
import io
import itertools
import math
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from marl_jax.runs.files import write_atomically
from marl_jax.study.curves import Panel, legend, running_mean, smoothing
from marl_jax.study.record import Series

# Apart in lightness as well as hue, for the colour-blind, and dark enough for text; the page lightens them when dark.
COLOURS = ("#0a6bdc", "#b84a00", "#0f5c40", "#7e3984")
INK, MUTED, GRID = "#1b1f24", "#656c76", "#e2e5e9"
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid"} | {c: f"--c{i}" for i, c in enumerate(COLOURS)}
WIDE, SMALL = (9.6, 3.0), (4.8, 2.3)  # inches
LEFT, RIGHT, BOTTOM, TOP = 0.5, 1.45, 0.42, 0.12  # inches around the axes; the labels stand at the right
LABEL_GAP = 0.085  # of the height of the axes
MOST_PIXELS = 60_000  # of an image's height; matplotlib draws none of 65,536


def svg(panel: Panel, *, wide: bool = False, name: str = "") -> str:
    """The picture as an <svg> element that takes its colours from the page; `name` keeps its ids apart."""
    with _style():
        from matplotlib.figure import Figure

        width, height = WIDE if wide else SMALL
        figure = Figure(figsize=(width, height))
        box = (LEFT / width, BOTTOM / height, 1 - (LEFT + RIGHT) / width, 1 - (BOTTOM + TOP) / height)
        draw(panel, figure.add_axes(box), wrap=None)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return _inline(text.getvalue(), panel.title, name)


def png(pictures: Sequence[Panel], path: Path, title: str, *, wide_first: bool = True) -> None:
    """All pictures in one image, the first over the whole width; the file appears once it is complete."""
    wide, small = (list(pictures[:1]), pictures[1:]) if wide_first else ([], pictures)
    heights = [WIDE[1]] * len(wide) + [SMALL[1] + 0.5] * math.ceil(len(small) / 2)
    height = sum(heights) + 0.6
    with _style():
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        layout = ConstrainedLayoutEngine(hspace=0.06, wspace=0.04)
        figure = Figure(figsize=(WIDE[0], height), dpi=min(150, MOST_PIXELS / height), layout=layout)
        figure.suptitle(_printable(title), x=0.012, ha="left", fontsize=11.5, fontweight="bold")
        grid = figure.add_gridspec(max(len(heights), 1), 2, height_ratios=heights or None)
        for panel in wide:
            draw(panel, figure.add_subplot(grid[0, :]), wrap=160, rows=1)
        for place, panel in enumerate(small):
            row, column = divmod(place, 2)
            draw(panel, figure.add_subplot(grid[len(wide) + row, column]))
        if not pictures:
            figure.text(0.5, 0.3, "nothing is recorded yet", ha="center", color=MUTED)
        figure.supxlabel(legend(pictures), x=0.012, ha="left", fontsize=7, color=MUTED)
        image = io.BytesIO()
        figure.savefig(image, format="png", metadata={"Software": None})
    write_atomically(path, image.getvalue())


def draw(panel: Panel, axes: Any, *, wrap: int | None = 78, rows: int = 2) -> None:
    """The panel on matplotlib axes; above it title and sentence, in so many rows of so many characters, or neither."""
    ends = []
    for line in panel.lines:
        colour, dashes = _look(line.colour)
        steps, values = line.series
        if line.low is not None and line.high is not None:
            axes.fill_between(steps, line.low, line.high, color=colour, alpha=0.16, linewidth=0)
        window = 1 if panel.points else smoothing(len(steps))
        if window > 1:
            axes.plot(steps, values, color=colour, alpha=0.28, linewidth=0.7, linestyle=dashes)
            values = running_mean(values, window)
        style = {"color": colour, "linewidth": 1.6, "linestyle": dashes, "markersize": 4, "clip_on": False}
        axes.plot(steps, values, **style)
        marked = np.isfinite(values) if panel.points else _lonely(values)
        if marked.any():
            axes.plot(steps[marked], values[marked], **style | {"linestyle": "", "marker": "o"})
        shown = Series(steps, values).known
        if len(shown.steps):
            ends.append((float(shown.values[-1]), line.name, colour))
    if panel.level is not None:
        axes.axhline(panel.level[0], color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        ends.append((panel.level[0], panel.level[1], MUTED))
    if panel.mark is not None:
        *point, text = panel.mark
        axes.plot(*point, "o", color=INK, markersize=7, markerfacecolor="none", markeredgewidth=1)
        side = "left" if point[0] < 0.1 * panel.last_step else "center"
        axes.annotate(text, point, xytext=(0, 8), textcoords="offset points", ha=side, fontsize=8.5)
    _scales(panel, axes)
    _label_ends(ends, panel, axes)
    if wrap is not None:
        axes.set_title(
            _printable(panel.title), loc="left", fontsize=9.5, fontweight="bold", pad=10 + 9 * rows
        )
        axes.annotate(
            textwrap.fill(panel.how, wrap), (0, 1), xycoords="axes fraction", xytext=(0, 6 + 9 * rows),
            textcoords="offset points", va="top", fontsize=7, color=MUTED,
        )  # fmt: skip


def _lonely(values: np.ndarray) -> np.ndarray:
    """Which values stand between gaps, so that no line shows them."""
    there = np.pad(np.isfinite(values), 1)
    return there[1:-1] & ~there[:-2] & ~there[2:]


def _look(colour: int | None) -> tuple[str, Any]:
    """Colour and dashes; where there are more roles than colours, they come again with other dashes."""
    if colour is None:
        return INK, "-"
    round_, place = divmod(colour, len(COLOURS))
    return COLOURS[place], ("-", (0, (5, 1.5)), (0, (1.5, 1.5)))[round_ % 3]


def _scales(panel: Panel, axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.set_xlim(0, max(panel.last_step, max(line.series.steps[-1] for line in panel.lines), 1))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.annotate(
        "step", (0, 0), xycoords="axes fraction", xytext=(-8, -6), textcoords="offset points",
        ha="right", va="top", color=MUTED,
    )  # fmt: skip
    if panel.logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(which="minor", length=0)
    else:
        bottom, top = axes.get_ylim()
        low, high = panel.bounds
        if high is None:  # room above, where the lower end is given and the upper one is not
            high = top if low is None else low + 1.05 * (max(top, low) - low) or 1.0
        axes.set_ylim(bottom if low is None else low, high)
        axes.yaxis.set_major_locator(MaxNLocator(5))
    percent = FuncFormatter(lambda value, _: f"{100 * value:.10g}%")
    axes.yaxis.set_major_formatter(
        percent if panel.percent else FuncFormatter(lambda value, _: f"{value:.6g}")
    )


def _label_ends(ends: Sequence[tuple[float, str, str]], panel: Panel, axes: Any) -> None:
    """Names and last values at the right edge, as near to their lines as they fit above each other."""
    height_of = lambda value: axes.transLimits.transform((0, axes.transScale.transform((0, value))[1]))[1]
    spread = _apart([height_of(value) for value, _, _ in ends], LABEL_GAP)
    for (value, name, colour), height in zip(ends, spread):
        short = _printable(name if len(name) <= 13 else name[:12] + "…")
        number = f"{value:.1%}" if panel.percent else f"{value:.3g}"
        axes.annotate(
            f"{short} {number}",
            (1, height),
            xycoords="axes fraction",
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=colour,
            annotation_clip=False,
        )


def _apart(heights: Sequence[float], gap: float) -> list[float]:
    """Heights in 0..1 moved as little as it takes for each to be `gap` above the next lower one."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed = list(heights)
    for below, above in itertools.pairwise(order):
        placed[above] = max(placed[above], placed[below] + gap)
    if order and placed[order[-1]] > 1:
        placed[order[-1]] = 1.0
        for above, below in itertools.pairwise(order[::-1]):
            placed[below] = min(placed[below], placed[above] - gap)
    return placed


@contextlib.contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    sober: dict[Any, Any] = {
        "font.family": "sans-serif",
        "font.size": 8.5,
        "text.color": INK,
        "text.parse_math": False,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": MUTED,
        "axes.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": GRID,
        "grid.linewidth": 0.7,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "ytick.major.size": 0,
        "xtick.major.size": 3,
        "svg.fonttype": "none",
        "svg.hashsalt": "marl_jax",
    }
    with matplotlib.rc_context(sober), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # names in a script that the font lacks
        yield


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _inline(text: str, title: str, name: str) -> str:
    """An <svg> file as an element of a page: no header, colours of the page, ids of its own."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<defs>\s*<style.*?</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r" font-family: [^;\"]*;", "", text)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text).replace("url(#", f"url(#{name}-")
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(title)}" ', 1).strip()
