"""Panels as pictures on white, for papers and wherever no page can be shown: one PNG and one SVG.

Lines are labelled at their end, with their last value. Matplotlib loads when something is drawn; nothing here reads a
run.
"""

import contextlib
import io
import itertools
import math
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from marl_jax.run_folder.files import write_atomically
from marl_jax.study.questions.bars import Finding
from marl_jax.study.record import Series
from marl_jax.study.report.curves import Panel
from marl_jax.study.wording import short_number
from marl_jax.terminal.tables import printable

# Different in lightness as well as hue, for the colour-blind, and dark enough for text; a dark page lightens them.
COLOURS = ("#0a6bdc", "#b84a00", "#0f5c40", "#7e3984")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)))  # for more roles than colours
INK, MUTED, GRID = "#1b1f24", "#656c76", "#e2e5e9"
WIDE, SMALL = (9.6, 3.0), (4.8, 2.3)  # inches
LABEL_GAP = 0.085  # between labels, as a share of the axes' height
MOST_PIXELS = 60_000  # height of an image; matplotlib cannot draw one of 65,536
UNSTABLE = {"png": "Software", "svg": "Date"}  # metadata by which equal pictures would differ
SMOOTH_FROM, WINDOWS = 40, 25  # lines of at least SMOOTH_FROM steps get a running mean over steps / WINDOWS


def images(pictures: Sequence[Panel], directory: Path, title: str, *, wide_first: bool = True) -> None:
    """Draw all panels into `report.png` and `report.svg`, the first over the full width; writes are atomic."""
    wide = len(pictures[:1]) if wide_first else 0
    heights = [WIDE[1]] * wide + [SMALL[1] + 0.5] * math.ceil((len(pictures) - wide) / 2)
    height = sum(heights) + 0.6
    dpi = min(150, MOST_PIXELS / height)
    with _figure(directory / "report", height, "png", "svg", dpi=dpi) as figure:
        figure.get_layout_engine().set(hspace=0.06, wspace=0.04)
        figure.suptitle(printable(title), x=0.012, ha="left", fontsize=11.5, fontweight="bold")
        grid = figure.add_gridspec(max(len(heights), 1), 2, height_ratios=heights or None)
        for i, panel in enumerate(pictures):
            row, column = divmod(i + wide, 2)  # a wide picture takes two places
            full_width = i < wide
            axes = figure.add_subplot(grid[0, :] if full_width else grid[row, column])
            draw(panel, axes)
            _explain(panel, axes, rows=1 if full_width else 2, width=160 if full_width else 78)
        if not pictures:
            figure.text(0.5, 0.3, "nothing is recorded yet", ha="center", color=MUTED)
        figure.supxlabel(legend(pictures), x=0.012, ha="left", fontsize=7, color=MUTED)


def bars(finding: Finding, path: Path) -> None:
    """Draw an interval for each number, with a dot for each run, as an SVG and a PNG of this name."""
    parts = finding.parts
    with _figure(path, 0.5 + 0.4 * len(parts) + 0.26 * len(finding.bars), "svg", "png") as figure:
        heights = [len(part.bars) for part in parts]
        for axes, part in zip(figure.subplots(len(parts), squeeze=False, height_ratios=heights)[:, 0], parts):
            low, high = part.ends
            for i, bar in enumerate(part.bars):
                ends = np.clip([bar.value.low, bar.value.high], low, high)
                axes.plot(ends, [i, i], color=INK, linewidth=1.4)
                axes.plot(bar.value.mean, i, "o", color=INK, markersize=5)
                axes.plot([bar.level] * 2, [i - 0.5, i + 0.5], color=MUTED, linewidth=0.9, zorder=0)
                axes.plot(bar.runs, [i] * len(bar.runs), "o", color=COLOURS[0], markersize=3, alpha=0.7)
            names = [printable(f"{bar.label}   {bar.verdict}".strip()) for bar in part.bars]
            axes.set_yticks(range(len(names)), names, fontsize=7)
            axes.set_ylim(len(part.bars) - 0.5, -0.5)
        how = f"{finding.unit}; lines are 95% intervals, dots are runs, upright lines are {finding.against}"
        axes.set_xlabel(how, fontsize=7, color=MUTED)


def legend(pictures: Sequence[Panel], numbers: str = "the number at the end is the last value") -> str:
    """A note on the smoothing of all pictures of steps; empty if no line is smoothed."""
    widest = max((window(panel, line.series) for panel in pictures for line in panel.lines), default=1)
    if widest == 1:
        return ""
    return f"Thin lines are single steps, thick ones the mean of the last {widest} at most; {numbers}."


def draw(panel: Panel, axes: Any) -> None:
    """Draw the panel on matplotlib axes, without its title."""
    ends = []
    for line in panel.lines:
        turn, place = divmod(line.colour or 0, len(COLOURS))
        colour = INK if line.colour is None else COLOURS[place]
        look: dict[str, Any] = {"color": colour, "linestyle": DASHES[turn % len(DASHES)]}
        steps, values = line.series
        if line.band is not None:
            axes.fill_between(steps, *line.band, color=colour, alpha=0.16, linewidth=0)
        if (width := window(panel, line.series)) > 1:
            axes.plot(steps, values, **look, alpha=0.28, linewidth=0.7)
            values = running_mean(values, width)
        axes.plot(steps, values, **look, clip_on=False)
        marked = np.isfinite(values) if panel.points else _lonely(values)
        if marked.any():
            axes.plot(steps[marked], values[marked], "o", color=colour, clip_on=False)
        if len(shown := Series(steps, values).known.values):
            ends.append((float(shown[-1]), line.name, colour))
    if panel.level is not None:
        axes.axhline(panel.level[0], color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        ends.append((*panel.level, MUTED))
    if panel.mark is not None:
        *point, text = panel.mark
        axes.plot(*point, "o", color=INK, markersize=7, markerfacecolor="none", markeredgewidth=1)
        side = "left" if point[0] < 0.1 * panel.last_step else "center"
        _write(axes, text, point, (0, 8), xycoords="data", ha=side)
    _scales(panel, axes)
    _label_ends(ends, panel, axes)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` values up to each, without NaNs; NaN if all are."""
    finite = np.isfinite(values)
    totals, counts = (
        np.convolve(one, np.ones(window))[: len(values)] for one in (np.where(finite, values, 0.0), finite)
    )
    return np.divide(totals, counts, out=np.full(len(values), np.nan), where=counts > 0.5)


def window(panel: Panel, series: Series) -> int:
    """Number of steps in the running mean of a line; 1 means no smoothing."""
    steps = len(series.steps)
    return 1 if panel.points or steps < SMOOTH_FROM else max(3, steps // WINDOWS)


def _lonely(values: np.ndarray) -> np.ndarray:
    """Which values have gaps on both sides, so that no line shows them."""
    finite = np.pad(np.isfinite(values), 1)
    return finite[1:-1] & ~finite[:-2] & ~finite[2:]


def _scales(panel: Panel, axes: Any) -> None:
    from matplotlib.ticker import LogLocator

    axes.set_xlim(0, max(panel.last_step, max(line.series.steps[-1] for line in panel.lines), 1))
    axes.locator_params(axis="x", nbins=6, integer=True)
    _write(axes, "step", (0, 0), (-8, -6), ha="right", va="top", color=MUTED)
    axes.set_ylabel(panel.unit, fontsize=7, color=MUTED)
    if panel.logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
        axes.yaxis.set_minor_formatter("")
    else:
        bottom, top = axes.get_ylim()
        low, high = panel.bounds
        if high is None:  # room above the lines, if only the lower end is given
            high = top if low is None else low + 1.05 * (max(top, low) - low) or 1.0
        axes.set_ylim(bottom if low is None else low, high)
        axes.locator_params(axis="y", nbins=6)
    percent, number = lambda value, _: f"{100 * value:.10g}%", lambda value, _: f"{value:.6g}"
    axes.yaxis.set_major_formatter(percent if panel.percent else number)


def _explain(panel: Panel, axes: Any, rows: int, width: int) -> None:
    """Write title and sentence above the axes; the sentence has `rows` lines of `width` characters."""
    axes.set_title(printable(panel.title), loc="left", fontsize=9.5, fontweight="bold", pad=10 + 9 * rows)
    _write(
        axes, textwrap.fill(panel.how, width), (0, 1), (0, 6 + 9 * rows), va="top", fontsize=7, color=MUTED
    )


def _label_ends(ends: Sequence[tuple[float, str, str]], panel: Panel, axes: Any) -> None:
    """Write names and last values at the right edge, as near to their lines as they fit above each other."""
    height_of = lambda value: axes.transLimits.transform((0, axes.transScale.transform((0, value))[1]))[1]
    spread = _apart([height_of(value) for value, _, _ in ends], LABEL_GAP)
    for (value, name, colour), height in zip(ends, spread):
        short = printable(name if len(name) <= 13 else f"{name[:6]}…{name[-6:]}")
        number = f"{value:.1%}" if panel.percent else short_number(value)
        _write(
            axes, f"{short} {number}", (1, height), (5, 0), va="center", color=colour, annotation_clip=False
        )


def _apart(heights: Sequence[float], gap: float) -> list[float]:
    """Heights in 0..1, moved so that each is `gap` above the next lower one; a smaller gap if they do not fit."""
    gap = min(gap, 1 / max(len(heights) - 1, 1))
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed = list(heights)
    for below, above in itertools.pairwise(order):
        placed[above] = max(placed[above], placed[below] + gap)
    if order and placed[order[-1]] > 1:
        placed[order[-1]] = 1.0
        for above, below in itertools.pairwise(order[::-1]):
            placed[below] = min(placed[below], placed[above] - gap)
    return placed


def _write(axes: Any, text: str, at: Sequence[float], offset: tuple[float, float], **look: Any) -> None:
    """Write a text `offset` points away from `at`, which is a fraction of the axes unless `xycoords` is given."""
    look = {"xycoords": "axes fraction", **look}
    axes.annotate(text, at, xytext=offset, textcoords="offset points", **look)


@contextlib.contextmanager
def _figure(path: Path, height: float, *kinds: str, **options: Any) -> Iterator[Any]:
    """A figure of full width, in the style of the page; at the end it is saved under this name, in these formats."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(fname=Path(__file__).with_name("drawing.mplstyle")), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # names in a script that the font lacks
        figure = Figure(figsize=(WIDE[0], height), layout="constrained", **options)
        yield figure
        for kind in kinds:
            image = io.BytesIO()
            figure.savefig(image, format=kind, metadata={UNSTABLE[kind]: None})
            write_atomically(path.with_name(f"{path.name}.{kind}"), image.getvalue(), shared=True)
