"""Curves can be told apart and read, on white and on black, whatever the eye."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from marl_jax.study.report import drawing


def test_labels_stand_apart_in_the_order_of_their_lines_and_inside():
    rng = np.random.default_rng(0)
    for count in range(1, 9):
        heights = rng.random(count) ** 3
        placed = drawing._apart(list(heights), 0.1)
        order = np.argsort(heights)
        assert all(b - a >= 0.1 - 1e-9 for a, b in itertools.pairwise(np.array(placed)[order]))
        assert max(placed) <= 1
    assert drawing._apart([0.2, 0.8], 0.1) == [0.2, 0.8]
    # More than there is room for: below the picture they would leave none to the curves.
    assert drawing._apart([0.5] * 41, 0.085) == pytest.approx(np.arange(41) / 40)


def test_a_value_between_gaps_is_marked_where_no_line_would_show_it():
    gap = np.nan
    assert drawing._lonely(np.array([1, gap, 2, 3, gap, 4, gap])).tolist() == [1, 0, 0, 0, 0, 1, 0]
    assert drawing._lonely(np.array([1.0])).tolist() == [True]


def style_colours():
    """{theme: {variable: colour}} of the style sheet."""
    sheet = (Path(drawing.__file__).parent / "page" / "style.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", sheet, re.DOTALL)
    expand = lambda c: c if len(c) == 7 else "#" + "".join(2 * x for x in c[1:])
    found = [{n: expand(c) for n, c in re.findall(r"(--\w+): (#\w+);", block)} for block in blocks]
    return dict(zip(("light", "dark"), found, strict=True))


def linear(colour):
    c = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def contrast(a, b):
    """WCAG 2.1."""
    bright, dark = sorted((np.dot([0.2126, 0.7152, 0.0722], linear(c)) for c in (a, b)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def lab(rgb):
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ np.clip(
        rgb, 0, 1
    )
    f = xyz / [0.9505, 1, 1.089]
    f = np.where(f > 0.008856, np.cbrt(f), 7.787 * f + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


SIGHT = {  # Machado, Oliveira and Fernandes 2009, severity 1, by rows
    "normal": "1 0 0  0 1 0  0 0 1",
    "protanopia": "0.152286 1.052583 -0.204868  0.114503 0.786281 0.099216  -0.003882 -0.048116 1.051998",
    "deuteranopia": "0.367322 0.860646 -0.227968  0.280085 0.672501 0.047413  -0.011820 0.042940 0.968881",
    "tritanopia": "1.255528 -0.076749 -0.178779  -0.078411 0.930809 0.147602  0.004733 0.691367 0.303900",
}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_curves_are_legible_in_light_and_in_dark(theme):
    colours = style_colours()[theme]
    for name in ("--ink", "--muted", "--good", "--bad", *(f"--c{i}" for i in range(len(drawing.COLOURS)))):
        assert contrast(colours[name], colours["--paper"]) >= 4.5, name


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("change", ["--good", "--bad"])
def test_a_gain_is_legible_on_the_fullest_colour_of_the_map(theme, change):
    sheet = (Path(drawing.__file__).parent / "page" / "style.css").read_text()
    share = dict(zip(("light", "dark"), re.findall(r"--fullest: (\d+)%;", sheet)))[theme]
    parts = [
        np.array([int(style_colours()[theme][name][i : i + 2], 16) for i in (1, 3, 5)])
        for name in (change, "--paper")
    ]
    mixed = np.rint(np.average(parts, axis=0, weights=[int(share), 100 - int(share)])).astype(int)
    assert contrast("#" + bytes(mixed.tolist()).hex(), style_colours()[theme]["--ink"]) >= 4.5


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_roles_are_told_apart_whatever_the_eye(theme, sight):
    colours, seeing = style_colours()[theme], np.reshape(SIGHT[sight].split(), (3, 3)).astype(float)
    seen = [lab(seeing @ linear(colours[f"--c{i}"])) for i in range(len(drawing.COLOURS))]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 20


def test_the_image_has_the_colours_of_the_page_in_light():
    light = style_colours()["light"]
    named = {"--ink": drawing.INK, "--muted": drawing.MUTED, "--grid": drawing.GRID}
    named |= {f"--c{place}": colour for place, colour in enumerate(drawing.COLOURS)}
    assert named.items() <= light.items()
