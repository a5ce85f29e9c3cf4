"""The page as a person uses it, in a real Chromium: it draws and filters, obeys and loads nothing, opens at once."""

import csv
import json
import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from study_folders import (
    RIGHT,
    WRONG,
    call,
    config,
    episode,
    evaluation,
    full_run,
    metrics,
    paired_results,
    run,
    table_of,
    write_run,
)

from marl_jax.episodes import Leaf
from marl_jax.rollouts import Table, read_episodes, write_episodes
from marl_jax.study.report.html_page import write_overview, write_report
from marl_jax.study.results import collect, read_study
from marl_jax.task import Task

pytestmark = pytest.mark.browser
# A new browser looks for updates and sends reports: none of that is the page's.
QUIET = (
    "no-sandbox",
    "disable-gpu",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
)
BROKEN = """() => {  // the parts of names, up to a sign, that lie on two lines
    const found = [];
    for (const name of document.querySelectorAll("tbody th")) {
        const texts = document.createTreeWalker(name, NodeFilter.SHOW_TEXT);
        while (texts.nextNode()) for (const part of texts.currentNode.data.matchAll(/[^\\s+_/-]+/g)) {
            const range = document.createRange();
            range.setStart(texts.currentNode, part.index);
            range.setEnd(texts.currentNode, part.index + part[0].length);
            if (new Set([...range.getClientRects()].map(box => box.top)).size > 1) found.push(part[0]);
        }
    }
    return found;
}"""
DRAWN = """let kind; window.drawn = []; Object.defineProperty(window, "uPlot", {get: () => kind, set: made => {
    kind = new Proxy(made, {construct(of, [options, values, place]) {
        drawn.push(values); return new of(options, values, place); }}); }});"""
ATTACK = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome")
    program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    assert program, "no Chromium: install it, or name its program in CHROMIUM"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=[f"--{flag}" for flag in QUIET])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """Open a page; at the end it must have said nothing on the console and asked for no other file."""
    heard, asked, opened = [], [], []

    def visit(path, width=1200, script="", **more):
        context = browser.new_context(viewport={"width": width, "height": 900}, **more)
        page = context.new_page()
        page.add_init_script(script)
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        opened.append((context, path))
        return page

    yield visit
    assert heard == []
    assert [url for url in asked if not url.startswith("blob:")] == [path.as_uri() for _, path in opened]
    for context, _ in opened:
        context.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = full_run(tmp_path_factory.mktemp("runs") / "one", steps=60)
    return write_report(folder)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A page over seven cells of two seeds: all rise from 25% to 45%, one by way of 90% to 41%."""
    place = tmp_path_factory.mktemp("study")
    rises, falls = (16, 29, 29, 29, 29, 29), (16, 58, 58, 26, 26, 26)
    teams = [
        f"{name}-{map}" for name in ("voting", "eval_opt", "orch_workers") for map in ("isolated", "shared")
    ]
    for cell in ("single-shared", *teams):
        for seed in (0, 1):
            right = falls if cell == "voting-isolated" else rises
            along = {10 * k: [1.0] * n + [0.0] * (64 - n) for k, n in enumerate(right)}
            run(place / "runs" / f"{cell}-s-math" / f"seed-{seed}", seed, along, f"{cell}-s-math")
    collect(place / "runs", place / "results")  # pages of results are written without pictures
    return write_overview(read_study(place / "results"), place / "page")[0]


def test_escape_on_a_curve_of_one_step_leaves_the_page_alive(visit, tmp_path):
    lines, played = [metrics(1)], [evaluation(0, 0.4)]
    page = visit(write_report(write_run(tmp_path / "one", lines=lines, evaluations=played)))
    curves = page.locator(".plot")
    for number in range(curves.count()):
        curves.nth(number).focus()
        page.keyboard.press("Escape")
    assert page.evaluate("1 + 1") == 2


def test_a_line_is_hidden_and_shown_again_without_leaving_its_button(visit, whole):
    page = visit(whole)
    page.locator(".values button").first.focus()
    for shown in ("false", "true"):
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == shown


def colours(page, figure):
    """How many different colours the canvas of a figure has."""
    return page.evaluate(
        """number => { const c = document.querySelectorAll("figure canvas")[number];
        const d = new Uint32Array(c.getContext("2d").getImageData(0, 0, c.width, c.height).data.buffer);
        return new Set(d).size; }""",
        figure,
    )


def test_a_line_is_hidden_alone_whatever_its_name(visit, tmp_path):
    for name in ("lr", "lr low", "step"):
        full_run(tmp_path / name, steps=45)
    reward = visit(write_overview(read_study(tmp_path))[0]).locator("figure").nth(1)
    for name, hidden in (("lr", ["lr"]), ("lr low", ["lr", "lr low"]), ("step", ["lr", "lr low", "step"])):
        reward.locator(".values button").get_by_text(re.compile(f"^{name} \\d")).click()
        assert [
            one.inner_text().rpartition(" 0.")[0] for one in reward.locator('[aria-pressed="false"]').all()
        ] == hidden


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_every_curve_is_drawn_and_nothing_is_wider_than_the_screen(visit, whole, width, scheme):
    page = visit(whole, width, color_scheme=scheme)
    assert page.locator("figure").count() == page.locator("figure canvas").count() == 6
    assert all(colours(page, figure) > 10 for figure in range(6))
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_curve_is_read_with_the_keyboard_hidden_by_its_name_and_saved(visit, whole):
    page = visit(whole)
    figure = page.locator("figure").nth(0)
    figure.locator(".plot").focus()
    page.keyboard.press("Home")
    assert "step 0" in figure.locator(".values").inner_text()
    page.keyboard.press("ArrowRight")
    assert "step 10" in figure.locator(".values").inner_text()
    assert "step 10" in page.locator("figure").nth(1).locator(".values").inner_text()  # as under a pointer
    reward = page.locator("figure").nth(1)
    reward.get_by_role("button", name="generator").click()
    assert reward.get_by_role("button", name="generator").get_attribute("aria-pressed") == "false"
    with page.expect_download() as told:
        reward.get_by_role("button", name="CSV").click()
    rows = told.value.path().read_text().splitlines()
    assert rows[0] == "step,outcome,aggregator" and len(rows) == 61  # what is drawn
    line = json.loads((whole.parent / "metrics.jsonl").read_text().splitlines()[6])
    assert [float(x) for x in rows[7].split(",")] == pytest.approx(
        [7, line["reward"], line["reward/aggregator"]], rel=1e-4
    )
    with page.expect_download() as told:
        reward.get_by_role("button", name="PNG").click()
    assert told.value.path().read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_curve_with_the_focus_reads_its_numbers_out_with_their_units(visit, whole):
    page = visit(whole)
    entropy = page.locator("figure").filter(has_text="Entropy")
    entropy.locator(".plot").focus()
    page.keyboard.press("Home")
    spoken = page.locator("[aria-live=polite]")
    assert spoken.count() == 1 and "step 1" in spoken.inner_text() and "nats" in spoken.inner_text()
    page.locator("figure").filter(has_text="Completion length").locator(".plot").focus()
    page.keyboard.press("End")
    assert "step 60" in spoken.inner_text() and "tokens" in spoken.inner_text()
    assert "aggregator" in spoken.inner_text() and "n = 512 calls" in spoken.inner_text()
    page.locator("figure").nth(0).locator(".plot").focus()
    page.keyboard.press("Home")
    assert "(36.1% – 47.6%), n = 128 problems" in spoken.inner_text()


def test_a_curve_is_zoomed_by_dragging_and_seen_whole_again(visit, whole):
    page = visit(whole)
    reward = page.locator("figure").nth(1)
    reward.locator(".plot").scroll_into_view_if_needed()
    box = reward.locator(".u-over").bounding_box()
    steps = lambda: page.evaluate(
        """() => { const c = document.querySelectorAll("figure canvas")[1]; return c.toDataURL(); }"""
    )
    before = steps()
    page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 50, steps=4)
    page.mouse.up()
    page.mouse.move(box["x"] + 2, box["y"] + 50)
    page.wait_for_function(
        "drawn => document.querySelectorAll('figure canvas')[1].toDataURL() !== drawn", arg=before
    )
    first = int(reward.locator(".values").inner_text().split("step ")[1].split()[0])
    assert 12 <= first <= 18  # a quarter of 60 steps is where the view begins
    reward.locator(".plot").focus()
    page.keyboard.press("Escape")
    page.mouse.move(box["x"] + 3, box["y"] + 50)
    page.wait_for_function("document.querySelectorAll('figure')[1].innerText.includes('step 1\\n')")


def test_curves_are_zoomed_without_a_pointer_about_the_step_that_was_read(visit, whole):
    page = visit(whole, 390, has_touch=True, is_mobile=True)
    reward = page.locator("figure").nth(1)
    assert not reward.get_by_text("drag to zoom").is_visible()
    shown = lambda key: (page.keyboard.press(key), reward.locator(".values").inner_text().split()[1])[1]
    reward.locator(".plot").focus()
    for _ in range(20):
        page.keyboard.press("ArrowRight")
    for name, ends in (("zoom in", ("11", "40")), ("see all", ("1", "60"))):
        reward.get_by_role("button", name=f"{name} o").focus()
        page.keyboard.press("Enter")
        reward.locator(".plot").focus()
        assert (shown("Home"), shown("End")) == ends


def test_tabs_are_chosen_with_the_arrow_keys(visit, whole):
    page = visit(whole)
    page.get_by_role("tab", name="Transcripts").focus()
    for name in ("One problem through the steps", "A whole group", "Who lost it", "Transcripts"):
        page.keyboard.press("ArrowRight")
        (chosen,) = [
            tab for tab in page.get_by_role("tab").all() if tab.get_attribute("aria-selected") == "true"
        ]
        assert chosen.inner_text() == name == page.get_by_role("tabpanel").get_attribute("aria-label")
        assert chosen.evaluate("tab => tab === document.activeElement")
        assert chosen.get_attribute("tabindex") == "0"


def test_a_printed_page_has_its_curves_and_words_and_nothing_to_press(visit, whole):
    page = visit(whole)
    page.emulate_media(media="print")
    assert page.locator("figure canvas").nth(0).is_visible()
    assert page.locator("article pre").first.is_visible()
    assert not any(
        control.is_visible() for control in page.locator("button.save, .filters, .tabs, details").all()
    )
    assert page.pdf()[:5] == b"%PDF-"


def test_an_alarm_is_marked_in_every_curve_where_it_began(visit, tmp_path):
    """At step 11 the generator becomes unreadable: the mean of three steps has risen by 0.3, where 0.2 is an alarm."""
    key = "role/generator/unreadable_share"
    lines = [metrics(step, **{key: 0.9 if step > 10 else 0.0}) for step in range(1, 31)]
    page = visit(write_report(write_run(tmp_path / "run", lines=lines, evaluations=[])))
    assert page.locator(".alarms li").count() == 1 and "readability" in page.locator(".alarms").inner_text()
    red = """number => { const c = document.querySelectorAll("figure canvas")[number];
        const probe = document.createElement("i");
        probe.style.color = "var(--bad)"; document.body.append(probe);
        const [r, g, b] = getComputedStyle(probe).color.match(/[0-9]+/g).map(Number);
        const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data, found = {};
        for (let i = 0; i < d.length; i += 4)
            if (Math.abs(d[i] - r) + Math.abs(d[i + 1] - g) + Math.abs(d[i + 2] - b) < 30 && d[i + 3] > 60)
                { const x = (i / 4) % c.width; found[x] = (found[x] ?? 0) + 1; }
        return Math.max(0, ...Object.values(found)); }"""
    count = page.locator("figure canvas").count()
    # A dashed upright line.
    assert count == 5 and all(page.evaluate(red, number) > 40 for number in range(count))
    figure = page.locator("figure").nth(0)
    figure.locator(".plot").focus()
    page.keyboard.press("Home")
    for _ in range(10):
        page.keyboard.press("ArrowRight")
    assert "1: readability (generator)" in figure.locator(".values .bad").inner_text()


def test_alarms_that_begin_near_each_other_have_their_numbers_side_by_side(visit, tmp_path):
    keys = [f"role/{role}/unreadable_share" for role in ("generator", "aggregator")]
    bad = lambda step: dict.fromkeys(keys, 0.9 if step > 10 else 0.0)
    path = write_report(
        write_run(
            tmp_path / "run", lines=[metrics(step, **bad(step)) for step in range(1, 31)], evaluations=[]
        )
    )
    script = """const kind = CanvasRenderingContext2D.prototype, write = kind.fillText; window.texts = [];
        kind.fillText = function(text, ...more) { texts.push(text); write.call(this, text, ...more); };"""
    page = visit(path, script=script)
    assert page.evaluate("texts.includes('1 2')")


def test_lost_episodes_and_updates_are_marked_in_every_curve_at_their_steps(visit, tmp_path):
    """The first and the last step at which episodes ended by an error, and at which an update was skipped."""
    lost = {
        4: {"failed": 2}, 9: {"failed": 1}, 12: {"failed": 3},
        20: {"policy/p0/skipped": 1},
    }  # fmt: skip
    lines, skipped = [], 0
    for step in range(1, 31):
        skipped += lost.get(step, {}).get("policy/p0/skipped", 0)
        lines.append(metrics(step, **{**lost.get(step, {}), "policy/p0/skipped": skipped}))
    script = """const kind = CanvasRenderingContext2D.prototype, write = kind.fillText; window.texts = [];
        kind.fillText = function(text, x, ...more) {
            texts.push({text, x, canvas: this.canvas, wide: this.canvas.width});
            write.call(this, text, x, ...more); };"""
    page = visit(write_report(write_run(tmp_path / "run", lines=lines, evaluations=[])), script=script)
    found = page.evaluate("""[...document.querySelectorAll("figure canvas")].map(canvas => {
        const box = canvas.closest("figure").querySelector(".u-over");
        const marks = texts.filter(one => one.text === "!" && one.canvas === canvas && one.wide === canvas.width);
        return [box.offsetLeft, box.offsetWidth, [...new Set(marks.map(one => one.x))]]; })""")
    assert len(found) == 5
    for left, width, marks in found:
        # Each sign stands three pixels behind its line.
        assert marks == pytest.approx([left + 3 + width * (step - 1) / 29 for step in (4, 12, 20)], abs=1)
    figure = page.locator("figure").nth(0)
    figure.locator(".plot").focus()
    page.keyboard.press("Home")
    told = {}
    for step in range(1, 31):
        told[step] = figure.locator(".values .bad").all_inner_texts()
        page.keyboard.press("ArrowRight")
    assert {step: texts for step, texts in told.items() if texts} == {
        4: ["!: episodes ended by an error"], 12: ["!: episodes ended by an error"],
        20: ["!: updates of policy p0 skipped"],
    }  # fmt: skip


def test_a_run_of_one_step_and_a_zoomed_curve_are_seen(visit, tmp_path):
    page = visit(write_report(write_run(tmp_path / "one", lines=[metrics(1)], evaluations=[])))
    marks = """() => [...document.querySelectorAll("figure canvas")].map(canvas => {
      const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      let strong = 0;
      const apart = i => Math.max(...data.slice(i, i + 3)) - Math.min(...data.slice(i, i + 3));
      for (let i = 0; i < data.length; i += 4) strong += data[i + 3] > 200 && apart(i) > 80;
      return strong; })"""
    assert min(page.evaluate(marks)) > 5  # no line, but a mark
    page = visit(
        write_report(write_run(tmp_path / "run", lines=[metrics(k) for k in range(1, 41)], evaluations=[]))
    )
    figure = page.locator("figure").nth(0)
    box = figure.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 20, steps=4)
    page.mouse.up()
    figure.locator(".plot").focus()
    seen = []
    for key in ("Home", "ArrowRight", "End", "ArrowRight"):
        page.keyboard.press(key)
        seen.append(int(figure.locator(".values").inner_text().split()[1]))
    assert 18 <= seen[0] <= 22 and seen[1] == seen[0] + 1 and 34 <= seen[2] < 40 and seen[3] == seen[2]


def test_a_running_mean_is_of_its_steps_alone_whatever_came_before(visit, tmp_path):
    lines = [metrics(step, reward=1e20 if step == 9 else 0.5) for step in range(1, 46)]
    page = visit(write_report(write_run(tmp_path / "run", lines=lines, evaluations=[])), script=DRAWN)
    _, single, mean, *_ = page.evaluate("drawn[0]")
    assert max(single) == single[8] == 1e20 and max(mean[:8] + mean[11:]) == min(mean) == 0.5


def test_more_transcripts_come_behind_those_that_were_opened(visit, tmp_path):
    said = {1: [(replace(episode(), sample=k), RIGHT) for k in range(20)]}
    page = visit(write_report(write_run(tmp_path / "run", lines=[metrics(1)], episodes=said)))
    page.evaluate("document.querySelector('article').dataset.opened = 1")
    page.get_by_role("button", name="show 8 more").focus()
    page.keyboard.press("Enter")
    assert page.locator("article[data-opened]").count() == 1 and page.locator("article").count() == 16
    assert page.evaluate("document.activeElement.className") == "episode"
    page.get_by_role("button", name="show").click()
    assert page.get_by_role("button", name="more").count() == 0


def test_gaps_between_sampler_and_trainer_are_shaded(visit, tmp_path):
    folder = write_run(tmp_path / "run", lines=[metrics(1)])
    spoken = replace(call("generator", "abcd", answer="2"), tokens=(0, 1), logprobs=(-0.5, -0.25))
    table = table_of(
        [(replace(episode(), calls=(spoken,)), {"outcome": 1.0, "rewards": [1.0], "advantages": [0.5]})]
    )
    trainer = [np.array([-0.5, -0.255], np.float32)]
    decode = lambda tokens: "".join(("ab", "cd")[token % 2] for token in tokens)
    write_episodes(folder / "episodes/step-000001.parquet", table, decode, trainer)
    page = visit(write_report(folder))
    page.locator("#view").get_by_label("Shade").select_option("gap")
    pieces = page.locator("article .call pre").last.locator("span")
    assert [float(piece.get_attribute("title").split()[1]) for piece in pieces.all()] == pytest.approx(
        [0, -0.005]
    )
    colours = [piece.evaluate("piece => getComputedStyle(piece).backgroundColor") for piece in pieces.all()]
    alphas = [float(colour.rpartition("/")[2].strip(" )")) if "/" in colour else 0.0 for colour in colours]
    assert alphas == pytest.approx([0, 0.325], abs=0.01)  # half of 0.01, of 65%


def test_a_call_before_a_fork_is_one_cell_over_its_branches(visit, tmp_path):
    folder = write_run(tmp_path / "run", lines=[metrics(1)])
    calls = [call("generator", "first", answer="7")]
    calls += [
        replace(call("aggregator", text, answer=text), path=(k,)) for k, text in enumerate(("46", "45"))
    ]
    leaves = tuple(Leaf((k,), text, outcome=1.0 - k) for k, text in enumerate(("46", "45")))
    forked = replace(episode(), calls=tuple(calls), answer=None, leaves=leaves, outcome=0.5)
    plain = replace(episode(), calls=(calls[0],), sample=1)
    table = Table.of([forked, plain]).replace(
        reward=np.array([0.5, 1.0, 0.0, 1.0]), advantage=np.array([0.0, 1.0, -1.0, 0.5])
    )
    write_episodes(folder / "episodes/step-000001.parquet", table)
    page = visit(write_report(folder))
    page.get_by_role("tab", name="A whole group").click()
    first, second = (page.locator("#view tbody tr").nth(row).locator("td") for row in (0, 1))
    assert first.count() == 2 and first.nth(0).get_attribute("colspan") == "2"
    assert "↳" not in first.nth(0).inner_text() and "7" in first.nth(0).inner_text()
    assert second.count() == 3 and "↳ aggregator" in second.nth(1).inner_text()
    assert ["46" in second.nth(0).inner_text(), "45" in second.nth(1).inner_text()] == [True, True]


def test_a_group_shows_all_of_its_eight_episodes_with_what_each_call_earned(visit, tmp_path):
    """The numbers are those of the file; another problem of the step has a group of its own."""
    rng, folder = np.random.default_rng(0), write_run(tmp_path / "run", lines=[metrics(1)])
    entries = []
    for sample in range(8):
        earned = {name: rng.normal(size=4).round(2).tolist() for name in ("rewards", "advantages")}
        one = replace(episode(answer=f"{sample}"), sample=sample)
        entries.append((one, {"outcome": float(sample % 2), **earned}))
    other = replace(episode(), task=Task("t2", "math", "1+1=?", gold="2"))
    path = folder / "episodes/step-000001.parquet"
    write_episodes(path, table_of([*entries, (other, RIGHT)]))
    page = visit(write_report(folder))
    page.get_by_role("tab", name="A whole group").click()
    heads, *rows = (row.locator("th, td").all_inner_texts() for row in page.locator("#view table tr").all())
    assert heads == [f"sample {sample}" for sample in range(8)] and [len(row) for row in rows] == [8] * 5
    table = read_episodes(path)
    signed = lambda value: f"{'−' if value < 0 else '+'}{abs(value):.2f}"
    for sample in range(8):
        for call_number in range(4):
            row = 4 * sample + call_number
            assert table.episode[row] == sample and table.call[row] == call_number
            wanted = f"reward {signed(table.reward[row])}, advantage {signed(table.advantage[row])}"
            assert rows[call_number][sample].splitlines()[-1] == wanted
        assert rows[4][sample] == f"{sample} {('wrong', 'right')[sample % 2]}"
    page.get_by_role("button", name="sample 7").click()
    assert "sample 7, outcome 1" in page.locator("article").inner_text()


def test_transcripts_are_filtered(visit, whole):
    page = visit(whole)
    told = page.get_by_role("status")
    assert told.inner_text() == "4 of 4 recorded episodes"
    page.locator("#view").get_by_label("Ending").select_option("wrong")
    assert told.inner_text() == "2 of 4 recorded episodes" and page.locator("article .bad").count() == 2
    page.locator("#view").get_by_label("Step").select_option(label="step 60")
    assert told.inner_text() == "1 of 4 recorded episodes"
    assert "reward −1.00 · advantage −1.40" in page.locator("article").inner_text()
    page.locator("#view").get_by_label("Text").fill("nothing like this")
    assert told.inner_text() == "0 of 4 recorded episodes"
    page.locator("#view").get_by_label("Text").fill("NO IDEA")
    assert told.inner_text() == "1 of 4 recorded episodes"


def test_transcripts_are_filtered_by_role_form_and_problem_and_say_what_was_asked(visit, tmp_path):
    """The first problem's generator is cut off and has an aggregator behind it, the second's cannot be read."""
    folder = write_run(tmp_path / "run", lines=[metrics(1)])
    cut = replace(call("generator", "a", answer="46"), finish_reason="length")
    both = replace(episode(), calls=(cut, call("aggregator", "a", answer="46")))
    other = Task("t2", "math", "1+1=?", gold="2")
    alone = replace(episode(), calls=(call("generator", "a"),), task=other)
    table = table_of([(both, RIGHT | {"rewards": [1.0] * 2, "advantages": [0.0] * 2}), (alone, WRONG)])
    write_episodes(folder / "episodes/step-000001.parquet", table, lambda tokens: "<a>"[: len(tokens)])
    page = visit(write_report(folder))
    chosen = lambda name: page.locator("#view").get_by_label(name)
    for choices, task in (
        ({"Role": "aggregator"}, "t1"),
        ({"Form": "cut off"}, "t1"),
        ({"Form": "cut off", "Role": "aggregator"}, None),  # it was another role that was cut off
        ({"Form": "unreadable"}, "t2"),
        ({"Problem": "t2"}, "t2"),
    ):
        for name, value in choices.items():
            chosen(name).select_option(label=value)
        assert page.get_by_role("status").inner_text() == f"{int(task is not None)} of 2 recorded episodes"
        assert task is None or f"task {task}," in page.locator("article p").first.inner_text()
        for name in choices:
            chosen(name).select_option("")
    asked = page.locator("article details").first
    assert not asked.locator("pre").is_visible()
    asked.get_by_text("prompt").click()
    assert asked.locator("pre").inner_text() == "<a>" and asked.locator("pre").is_visible()
    first, second = page.locator("article").all_inner_texts()
    assert first.startswith("step 1, right") and first.endswith("Answer: 46. Wanted: 46.")
    assert second.startswith("step 1, wrong") and second.endswith("Answer: 46. Wanted: 2.")


def test_where_a_problem_turned_who_lost_it_and_a_group_are_shown(visit, tmp_path):
    """At step 1 the picker drops a right candidate, at step 2 it takes it; the second problem teaches nothing."""

    def played(right, choice, task="t1"):
        calls = [call("generator", f"x{k}", k, answer=value) for k, value in enumerate(("46", "45"))]
        calls.append(call("aggregator", choice, answer=choice, reads=(0, 1)))
        task = Task(task, "math", "12+34=?", gold="46")
        return replace(
            episode(), calls=tuple(calls), answer="46" if right else "45", answers=(1.0, 0.0, None), task=task
        )

    earned = {"outcome": 0.0, "rewards": [1.0, 0.0, 0.0], "advantages": [0.7, -0.7, 0.0]}
    flat = {"outcome": 1.0, "rewards": [1.0] * 3, "advantages": [0.0] * 3}
    steps = {
        1: [(played(False, "2\r3"), earned), (played(True, "1", "t2"), flat)],
        2: [(played(True, "1"), earned | {"outcome": 1.0}), (played(True, "1", "t2"), flat)],
    }
    folder = write_run(tmp_path / "run", lines=[metrics(1), metrics(2)])
    for step, entries in steps.items():
        table = table_of([(replace(one, outcome=e["outcome"]), e) for one, e in entries])
        grades = np.concatenate([[np.nan if x is None else x for x in one.answers] for one, _ in entries])
        write_episodes(folder / "episodes" / f"step-{step:06d}.parquet", table.replace(grade=grades))
    page = visit(write_report(folder))
    page.get_by_role("tab", name="One problem").click()
    rows = page.locator("#view tbody tr")
    assert "turned right: aggregator changed first" in rows.nth(1).inner_text()
    assert "46 ✓" in rows.nth(0).inner_text() and "45 ✗" in rows.nth(0).inner_text()
    with page.expect_download() as told:
        page.get_by_role("button", name="CSV of One problem", exact=True).click()
    with told.value.path().open(newline="", encoding="utf-8") as file:
        assert len(list(csv.reader(file))) == 3  # a carriage return in an answer ends no row
    page.get_by_role("tab", name="A whole group").click()
    assert "Taught nothing: aggregator." in page.locator("#view").inner_text()
    page.locator("#view").get_by_label("Problem").select_option(label="t2")
    assert "Taught nothing: generator, aggregator." in page.locator("#view").inner_text()
    with page.expect_download() as told:
        page.get_by_role("button", name="CSV of A whole group", exact=True).click()
    assert told.value.path().read_text().startswith('sample 0\n"generator 0 46 reward +1.00, advantage')
    page.get_by_role("tab", name="Who lost it").click()
    with page.expect_download() as told:
        page.get_by_role("button", name="CSV of Who lost it", exact=True).click()
    assert told.value.path().read_text() == ",wrong,lost by aggregator\nstep 1,1,100.0% (1)\nstep 2,0,–\n"
    page.get_by_role("button", name="100.0% (1)").click()
    assert page.get_by_role("status").inner_text() == "1 of 4 recorded episodes"
    assert "lost by aggregator" in page.locator("article h3").inner_text()


def test_tokens_are_shaded_character_by_character_whatever_they_are(visit, tmp_path):
    folder = write_run(tmp_path / "run", lines=[metrics(1)])
    words = ["\U0001d465 = ", "\U0001f600", "2", "", "!", "", "."]
    said = "".join(words[token % 7] for token in range(4))
    spoken = call("generator", said, answer="2")
    spoken = replace(spoken, tokens=(0, 1, 2, 3), logprobs=(-0.1, -4.0, -0.2, -0.3))
    silent = replace(call("aggregator", "", answer=None), tokens=(3,), logprobs=(-0.5,))
    one = replace(episode(), calls=(spoken, silent))
    earned = {"outcome": 1.0, "rewards": [1.0, 0.0], "advantages": [0.5, -0.5]}
    decode = lambda tokens: "".join(words[token % 7] for token in tokens)
    write_episodes(folder / "episodes" / "step-000001.parquet", table_of([(one, earned)]), decode)
    page = visit(write_report(folder))
    page.locator("#view").get_by_label("Shade").select_option("log-prob")
    pieces = page.locator("article .call").nth(0).locator("pre").last.locator("span")
    assert pieces.all_inner_texts() == ["\U0001d465 = ", "\U0001f600", "2", ""]
    assert pieces.nth(1).get_attribute("title") == "log-prob -4"


def test_hostile_text_is_text(visit, tmp_path):
    about = config(cell=ATTACK)
    hostile = replace(
        episode(answer=ATTACK, texts=(ATTACK,)), task=Task(ATTACK, "math", ATTACK, gold=ATTACK), error=ATTACK
    )
    folder = write_run(
        tmp_path / "<img src=x>",
        about=about,
        lines=[metrics(1) | {"warnings": [ATTACK, "x" * 10_000]}],
        episodes={1: [(hostile, WRONG)]},
    )
    page = visit(write_report(folder))
    for name in ("Transcripts", "One problem", "A whole group", "Who lost it"):
        page.get_by_role("tab", name=name).click()
    page.get_by_role("tab", name="Transcripts").click()
    assert page.title() == f"{ATTACK}, seed 7" and page.locator("img").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200
    assert ATTACK in page.locator("article pre").nth(0).inner_text()


def test_a_page_of_500_steps_and_2000_transcripts_opens_in_two_seconds(visit, tmp_path):
    said = [
        (episode(texts=(f"{n} is \\boxed{{{n}}}" * 4,) * 3), RIGHT if n % 2 else WRONG) for n in range(100)
    ]
    folder = write_run(
        tmp_path / "run",
        lines=[metrics(step) for step in range(1, 501)],
        evaluations=[evaluation(step, 0.5) for step in range(0, 501, 10)],
        episodes=dict.fromkeys(range(25, 501, 25), said),
    )
    path = write_report(folder)
    assert path.stat().st_size < 15_000_000
    took = []
    for _ in range(3):  # the quickest, since others may be at work on the machine
        start = time.monotonic()
        page = visit(path)
        page.get_by_text("of 2000 recorded episodes").wait_for()
        took.append(time.monotonic() - start)
    assert min(took) < 2


def test_runs_are_overlaid_and_the_map_leads_to_them(visit, tmp_path):
    for cell, steps in (("voting-isolated-s-math", 45), ("voting-shared-s-math", 60)):
        full_run(tmp_path / cell, steps=steps, cell=cell)
    page = visit(write_overview(read_study(tmp_path))[0], 1280, DRAWN)
    assert page.evaluate("drawn[1].slice(1).map(line => line.filter(value => value !== null).length)") == [
        45, 45, 60, 60,
    ]  # single steps and their mean, to the last step of each run  # fmt: skip
    # Nor is a step of another run a gap.
    assert not page.evaluate("drawn[1].some(line => line.includes(null))")
    assert page.locator("figure canvas").count() == 2 and colours(page, 0) > 10
    wide = "[...document.querySelectorAll('.scroll')].filter(one => one.scrollWidth > one.clientWidth).length"
    assert page.evaluate(wide) == 0
    page.set_viewport_size({"width": 718, "height": 900})  # A4 at 96 dots an inch, with its margins
    page.emulate_media(media="print")
    assert page.evaluate(wide) == 0
    assert page.locator("table.map td a").count() == 2
    assert page.locator("table.map td").nth(0).inner_text().startswith("+")


def test_the_map_shows_cliffs_is_as_full_as_its_largest_gain_and_is_saved_with_the_other_tables(visit, study):
    page = visit(study)
    cells = page.locator("table.map td")
    assert "in full colour at 20.3 points" in page.locator("main").inner_text()
    shown = {cell.inner_text().split("\n")[0]: cell.get_attribute("style") for cell in cells.all()}
    assert shown == {"+15.6 ▼": "--gain: 0.77", "+20.3": "--gain: 1.00"}
    paint = lambda cell: cell.evaluate("cell => getComputedStyle(cell).backgroundColor")
    assert len({paint(cell) for cell in cells.all()}) == 2
    for name, wanted in (
        ("map", [",s math", "eval_opt shared (workflow voting),+20.3"]),
        ("Runs", [",cell,steps,base,final", "single-shared-s-math/seed-0,single-shared-s-math,50/50,25.0%"]),
    ):
        holder = page.locator("section").filter(has=page.locator(f"table[data-name={name}]"))
        with page.expect_download() as told:
            holder.get_by_role("button", name="CSV").click()
        rows = told.value.path().read_text().splitlines()
        assert told.value.suggested_filename == f"{name}.csv" and len(rows) == {"map": 8, "Runs": 15}[name]
        assert rows[0].startswith(wanted[0]) and any(row.startswith(wanted[1]) for row in rows)


def test_the_dots_of_a_bar_are_its_runs_at_their_numbers(visit, tmp_path):
    place, points = paired_results(tmp_path)
    page = visit(write_overview(read_study(place), tmp_path / "page")[0])
    centre = "mark => { const box = mark.getBoundingClientRect(); return box.left + box.width / 2; }"
    for label, values in points.items():
        bar = page.locator(f".bars > span:text-is('{label}') + div").first
        dots, mean = (
            [dot.evaluate(centre) for dot in bar.locator("i").all()],
            bar.locator("b").evaluate(centre),
        )
        box = bar.bounding_box()
        share = float(bar.evaluate("bar => getComputedStyle(bar).backgroundPositionX").rstrip("%")) / 100
        zero = box["x"] + share * (box["width"] - 1) + 0.5  # the upright line is one pixel wide
        scale = (mean - zero) / np.mean(values)
        assert len(dots) == len(values) and scale > 0 and max(dots) - min(dots) > 10
        assert dots == pytest.approx([zero + scale * value for value in values], abs=1.5)
        assert all(box["x"] - 1 <= dot <= box["x"] + box["width"] + 1 for dot in dots)


def test_a_run_of_an_earlier_version_has_a_page_among_others(visit, tmp_path):
    full_run(tmp_path / "new", steps=20)
    shutil.copytree(Path(__file__).parents[2] / "fixtures/old_run/run", tmp_path / "old")
    page = visit(write_overview(read_study(tmp_path))[0])
    link = page.get_by_role("link", name="old", exact=True)
    assert link.get_attribute("href") == "old/report.html"
    page = visit(tmp_path / "old" / "report.html")
    assert page.get_by_role("status").inner_text() == "8 of 8 recorded episodes"
    assert page.locator("figure canvas").count() == 5 and colours(page, 0) > 10
    page.get_by_role("tab", name="A whole group").click()
    first = page.locator("#view tbody tr").first.locator("td").all_inner_texts()
    assert len(first) == 4 and all(text.endswith("reward +0.00, advantage +0.00") for text in first)


def test_of_many_lines_a_few_are_picked(visit, study):
    figure = visit(study).locator("figure").first
    hidden = lambda: figure.locator("[aria-pressed=false]").count()
    figure.get_by_role("button", name="show no lines").click()
    assert hidden() == 7
    figure.locator(".values button").nth(2).click()
    assert hidden() == 6
    figure.get_by_role("button", name="show all lines").click()
    assert hidden() == 0


def test_on_a_phone_names_are_wrapped_behind_their_signs(visit, tmp_path):
    name = "single_token_matched-shared-xs-math+rounds6+multiplicity+regime"
    along = {10 * k: [1.0] * 20 + [0.0] * 44 for k in range(3)}
    for seed in (0, 1):
        run(tmp_path / "runs" / name / f"seed-{seed}", seed, along, name)
    page = visit(write_overview(read_study(tmp_path / "runs"), tmp_path / "page")[0], 390)
    assert page.locator("tbody th").get_by_text(name).count() and page.evaluate(BROKEN) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_a_study_fits_the_screen_and_what_is_long_is_folded_and_printed(visit, study, width, scheme):
    page = visit(study, width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width and colours(page, 0) > 10
    # The caption says it once for all lines.
    assert page.locator(".values").nth(0).inner_text().count("n = ") == 0
    run_link, bar = (
        page.get_by_role("link", name="voting-shared-s-math/seed-1"),
        page.locator(".fold .bars").first,
    )
    assert (run_link.is_visible(), bar.is_visible()) == (False, width == 1200)
    page.get_by_text("14 rows").click()
    assert run_link.is_visible()
    page.get_by_text("14 rows").click()
    page.emulate_media(media="print")
    assert run_link.is_visible() and bar.is_visible() and not page.locator("summary").first.is_visible()
