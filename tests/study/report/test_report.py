"""The page about a run tells what the folder holds, says what it lacks, and obeys nothing that a model wrote."""

import base64
import contextlib
import dataclasses
import errno
import hashlib
import html.parser
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from urllib.parse import unquote

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
    write_run,
)

from marl_jax.rollouts import Episode, ToolRecord, read_episodes
from marl_jax.run_folder import files
from marl_jax.run_folder.folder import FolderError
from marl_jax.study import record, run_sentences, run_tables
from marl_jax.study.questions import findings
from marl_jax.study.record import read_run
from marl_jax.study.report import curves, drawing
from marl_jax.study.report.html_page import write_overview, write_report
from marl_jax.study.results import read_study
from marl_jax.task import Task

pytestmark = pytest.mark.filterwarnings("error::UserWarning")  # matplotlib's, where a picture came out wrong
UPLOT = (
    "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"  # sha256 of uplot.js, version 1.6.32
)
VOID = {"meta", "br", "wbr", "img", "link", "input", "hr"}


class Page(html.parser.HTMLParser):
    """A page taken apart: elements, their attributes, and the text that a reader sees."""

    def __init__(self, path):
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags, self.ids, self.links, self.attributes, self.text, self.open = [], [], [], [], "", []
        self.scripts = []
        self.feed(self.source)
        self.close()
        assert not self.open, f"never closed: {self.open}"
        self.words = " ".join(self.text.split())
        self.data = json.loads(self.scripts[0])  # what the scripts show
        self.said = self.data["said"]

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        self.ids += [value for name, value in attributes if name == "id"]
        self.links += [value for name, value in attributes if name in ("href", "xlink:href", "src")]
        if tag == "wbr":  # inside of a word
            self.text = self.text.removesuffix(" ")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        if "script" in self.open:
            self.scripts.append(data)
        elif "style" not in self.open:
            self.text += data + " "


def png_size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[-8:-4] == b"IEND"
    assert struct.unpack(">I", data[-4:])[0] == zlib.crc32(b"IEND")
    return struct.unpack(">II", data[16:24])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = full_run(tmp_path_factory.mktemp("runs") / "one", steps=60)
    return folder, Page(write_report(folder))


# ---------------------------------------------------------------- one run


def test_the_page_is_one_file_that_loads_nothing_and_runs_two_scripts_alone(whole):
    _, page = whole
    assert not {"img", "link", "iframe", "object", "embed", "base", "svg"} & set(page.tags)
    assert all(link.startswith("#") for link in page.links)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "src"]
    policy = next(value for name, value in page.attributes if value and value.startswith("default-src"))
    plots, own = page.scripts[1:]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (plots, own)]
    wanted = (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}' 'sha256-{hashes[1]}'; style-src 'unsafe-inline'"
    )
    assert policy == wanted and len(page.scripts) == 3
    assert hashlib.sha256(plots.encode()).hexdigest() == UPLOT
    assert "innerHTML" not in own and "eval" not in own.replace("evaluation", "") and "fetch(" not in own
    assert "url(" not in page.source.replace(plots, "") and "@import" not in page.source


def test_ids_are_unique(whole):
    _, page = whole
    assert page.ids and len(page.ids) == len(set(page.ids))


def test_the_numbers_on_top_are_those_of_the_evaluations(tmp_path):
    by = {"mean": 0.14, "low": 0.06, "high": 0.218}
    records = [
        evaluation(0, 0.42),
        evaluation(10, 0.61),
        evaluation(20, 0.56, by, ci_low=0.481, ci_high=0.636),
        evaluation(20, 0.5, split="test"),
        evaluation(0, 0.3, mode="base", split="test"),
    ]
    run = read_run(write_run(tmp_path / "run", lines=[metrics(20)], evaluations=records[::-1]))
    assert run_sentences.key_numbers(run) == [
        ("Base accuracy", "42.0%", "36.0 – 47.5%, n = 128 problems"),
        ("Final accuracy", "56.0%", "step 20, 48.1 – 63.6%, n = 128 problems"),
        ("Best accuracy", "61.0%", "step 10, 55.0 – 66.5%, n = 128 problems"),
        ("Final over base", "+14.0 points", "+6.0 to +21.8, paired, n = 128 problems"),
    ]
    assert "excludes zero: it became better" in run_sentences.in_words(run)[0]
    shown = [row[:5] for row in run_tables.evaluations(run).rows]
    assert shown == [
        ("step 0", "base", "val", "trained", "42.0%"),
        ("step 10", "best", "val", "trained", "61.0%"),
        ("step 20", "final", "val", "trained", "56.0%"),
        ("step 0", "–", "test", "base", "30.0%"),
        ("step 20", "–", "test", "trained", "50.0%"),
    ]


@pytest.mark.parametrize(
    "mean, words",
    [(0.03, "includes zero"), (-0.03, "includes zero"), (-0.07, "excludes zero: it became worse")],
)
def test_a_difference_is_called_one_where_its_interval_excludes_zero(tmp_path, mean, words):
    by = {"mean": mean, "low": mean - 0.05, "high": mean + 0.05}
    run = read_run(write_run(tmp_path / "run", evaluations=[evaluation(0, 0.4), evaluation(5, 0.43, by)]))
    assert words in run_sentences.in_words(run)[0]


def test_the_page_tells_what_the_run_was_and_how_it_went(whole):
    folder, page = whole
    for words in (
        "voting-isolated-s-math",
        str(folder),
        "all 60 steps",
        "generator → p0, aggregator → p1",
        "64 problems × 8 episodes",
        "base configs/bases/micro-s data",
        "base configs/bases/micro-s aaaaaaaaaaaa, tokenizer bbbbbbbbbbbb, data train dddddddddddd",
        "rubric (alpha 0.5, batch task, leaves mean, threads 1)",
        "max_new_tokens 64, temperature 1.0",
        "jax 0.10.2",
        "rollout 62%; grade 5%; learn 31%",
        "generator step 1 generator step 60 aggregator step 1 aggregator step 60",
        "own answer or verdict right 32.1%",
        "chi2, sampler to trainer 1e-06 1e-06 2e-06 2e-06",
        "groups that teach nothing 31.2% 31.2% 32.8% 32.8%",
        "clipped high 0.3% 0.3% 0.3% 0.3%",  # of roles
        "clipped high 0.2% 0.2% 0.2% 0.2%",  # of policies
        "KL to the old log-probs, nats 0.001 0.001 0.001 0.001",
        "2 steps, 3 to 10; the last: role 'generator': sampler and trainer log-probs are up to 0.0031 apart",
    ):
        assert words in page.words, words


def test_every_picture_has_its_sentence_and_names_the_roles(whole):
    _, page = whole
    assert page.tags.count("figure") == page.tags.count("figcaption") == len(page.data["panels"]) == 6
    assert [panel["title"] for panel in page.data["panels"]] == [
        "Accuracy on validation problems", "Reward", "Gradient norm", "Share of gradient mass",
        "Completion length", "Entropy",
    ]  # fmt: skip
    for panel in page.data["panels"][1:]:
        assert {"generator", "aggregator"} <= {line["name"] for line in panel["lines"]}


def test_there_is_an_image_of_all_curves_and_no_rest_of_writing(whole):
    folder, _ = whole
    width, height = png_size(folder / "report.png")
    assert width == 1440 and height > 1000
    assert "Gradient norm" in (folder / "report.svg").read_text()
    assert not list(folder.glob(".*unfinished"))


def test_the_same_folder_gives_the_same_page_and_image(whole):
    folder, page = whole
    image = (folder / "report.png").read_bytes()
    write_report(folder)
    assert (folder / "report.html").read_text(encoding="utf-8") == page.source
    assert (folder / "report.png").read_bytes() == image


# ---------------------------------------------------------------- what is not there


def test_a_folder_that_cannot_be_written_is_one_line_and_no_rest_of_writing(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run")

    def read_only(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(files.os, "replace", read_only)
    with pytest.raises(FolderError, match=r"cannot be used \(Read-only file system\)"):
        write_report(folder)
    assert not list(folder.glob("*report*")) and not list(folder.glob(".report*"))


def test_a_run_that_has_just_begun_has_a_page_that_says_so(tmp_path):
    folder = write_run(tmp_path / "run")
    page = Page(write_report(folder))
    for words in (
        "none of 200 steps is recorded yet",
        "No evaluation is recorded",
        "there are no curves",
        "No episodes were written",
    ):
        assert words in page.words
    assert "figure" not in page.tags and png_size(folder / "report.png")


def test_an_unfinished_run_without_evaluations_or_episodes_says_so(tmp_path):
    folder = write_run(tmp_path / "run", lines=[metrics(1), metrics(2)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward": 0.')  # being written, or cut short by a kill
    page = Page(write_report(folder))
    for words in ("step 2 of 200: not finished", "No evaluation is recorded", "No episodes were written"):
        assert words in page.words
    assert "Accuracy on validation problems" not in page.words and page.tags.count("figure") == 5


def test_a_run_that_was_evaluated_on_test_alone_is_not_said_to_have_no_evaluation(tmp_path):
    played = evaluation(2, 0.5, split="test", checkpoint="2")
    page = Page(
        write_report(write_run(tmp_path / "run", lines=[metrics(1), metrics(2)], evaluations=[played]))
    )
    assert "Training made no evaluation, so" in page.words and "50.0%" in page.words


def test_nulls_are_gaps_and_dashes_never_zeros(tmp_path):
    lines = [metrics(step) for step in range(1, 6)]
    for line in lines:
        line["gradient/p0/amplification"] = line["role/generator/perplexity"] = None
    lines[1]["reward/generator"] = lines[4]["reward"] = lines[4]["role/aggregator/entropy"] = None
    lines[2]["gradient/p0/norm/generator"] = None
    null = evaluation(5, 0.5, {"mean": None, "low": None, "high": None}, any_correct=None)
    records = [evaluation(0, 0.4), null | {"ci_low": None, "ci_high": None}, {"step": 3, "accuracy": None}]
    folder = write_run(tmp_path / "run", lines=lines, evaluations=records)
    page = Page(write_report(folder))
    run = read_run(folder)
    assert np.isnan(run.series("reward/generator").values).tolist() == [False, True, False, False, False]
    assert "perplexity – – 1.89 1.86" in page.words
    assert re.search(r"entropy, nats 0\.\d+ 0\.\d+ 0\.\d+ –", page.words)
    assert "Final accuracy 50.0% step 5, –" in page.words and "nan" not in page.words.lower()


def test_metrics_of_a_single_role_without_role_gradients(tmp_path):
    lines = [metrics(step, roles=("generator",)) for step in (1, 2, 3)]
    lines = [{k: v for k, v in line.items() if not k.startswith("gradient/")} for line in lines]
    about = config("single-shared-s-math")
    about["config"]["policies"]["map"] = {"generator": "p0"}
    run = read_run(write_run(tmp_path / "run", about=about, lines=lines))
    assert list(record.gradient_norms(run)) == ["p0"]
    titles = [panel.title for panel in curves.panels(run)]
    # Nothing to share or amplify.
    assert titles == ["Reward", "Gradient norm", "Completion length", "Entropy"]


# ---------------------------------------------------------------- hostile text

ATTACKS = (
    "<script>alert(1)</script>",
    "</pre></article><img src=x onerror=alert(1)>",
    "{{ config }}{% raw %}",
    '"><svg onload=alert(1)>',
    "$\\frac{1$ --> ]]> \x1b[2J \ud800 一",
)


def test_whatever_a_model_or_a_folder_says_is_text(tmp_path):
    attack = " ".join(ATTACKS)
    about = config(cell=attack)
    about["config"]["policies"] = {"map": {attack: "p0"}, "base": attack}
    about["changes"] = [[attack]]
    lines = [metrics(step, roles=("generator",)) | {"warnings": [attack]} for step in (1, 2)]
    lines = [{key.replace("generator", attack): value for key, value in line.items()} for line in lines]
    hostile = Episode(
        Task(attack, "math", attack, gold=attack),
        0,
        attack,
        (call("generator", attack, answer=attack), call(attack, attack)),
        attack,
        tools=(ToolRecord(attack, attack), ToolRecord("t", None, attack, after_call=1)),
        error=attack,
    )
    records = [evaluation(0, 0.5), evaluation(1, 0.5, split=attack, mode=attack)]
    folder = write_run(
        tmp_path / "<b>run", about=about, lines=lines, evaluations=records, episodes={2: [(hostile, WRONG)]}
    )
    page = Page(write_report(folder))
    assert page.tags.count("script") == 3 and "img" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.words.count("<script>alert(1)</script>") > 5 and "{{ config }}" in page.words
    assert not set("<>&") & set(page.scripts[0])
    (one,) = page.said["episodes"]
    assert page.said["tasks"][0]["question"] == one["a"] == attack
    assert one["calls"][1]["r"] == attack.replace("\ud800", "?")


def test_episodes_that_cannot_be_read_are_named_on_the_page(tmp_path):
    folder = write_run(tmp_path / "run", episodes={1: [(episode(), RIGHT)]})
    (folder / "episodes" / "step-000009.parquet").write_bytes(b"no parquet")
    page = Page(write_report(folder))
    assert "step-000009.parquet' cannot be read as episodes" in page.words and len(page.said["episodes"]) == 1


def test_what_was_drawn_again_is_said_to_be_no_fair_sample(tmp_path):
    line = metrics(1)
    for drawn, said in (({}, False), ({"draws/first_reward": 0.4}, True)):
        folder = write_run(tmp_path / str(said), lines=[line | drawn, metrics(2) | drawn])
        assert ("the kept ones are no fair sample" in Page(write_report(folder)).words) == said


# ---------------------------------------------------------------- many runs


def test_a_folder_of_runs_has_a_row_for_each_and_links_that_lead_somewhere(tmp_path):
    lines = [metrics(step) for step in range(1, 4)]
    by = {"mean": 0.1, "low": 0.02, "high": 0.18}
    along = [evaluation(0, 0.4), *(evaluation(k, 0.5, by) for k in (1, 2, 3))]
    write_run(tmp_path / "b & <c>" / "seed 0", lines=lines, evaluations=along)
    write_run(tmp_path / "a", lines=lines[:1])
    broken = write_run(tmp_path / "broken", lines=lines)
    (broken / "metrics.jsonl").write_text("{]\n")
    for number, text in enumerate(("[]", '{"config": "x"}', "{")):
        lost = write_run(tmp_path / f"lost {number}", lines=lines)
        (lost / "config.json").write_text(text)
    blocked = write_run(tmp_path / "blocked", lines=lines)
    (blocked / "eval.jsonl").mkdir()
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")  # a model, not a run
    path = write_overview(read_study(tmp_path))[0]
    assert "change our mind" not in path.read_text()  # these runs answer no question of the study
    page = Page(path)
    assert path == tmp_path / "report.html" and png_size(tmp_path / "report.png")
    assert "2 runs." in page.words
    assert "Cells that are not compared" in page.words and "not all steps are made" in page.words
    assert [line["name"] for line in page.data["panels"][0]["lines"]] == ["b & <c>/seed 0"]
    assert "b & <c>/seed 0 voting-isolated-s-math 3/200 40.0%" in page.words
    assert "50.0% not finished +10.0 +2.0 to +18.0 – not evaluated" in page.words
    assert "A cliff is a drop" in page.words
    assert "broken/metrics.jsonl' holds a line that is no JSON" in page.words
    assert "blocked/eval.jsonl' cannot be used" in page.words
    for number, told in enumerate(("is not a run's", "is damaged (config, ", "is no JSON")):
        assert re.search(rf"lost {number}\b.*{re.escape(told)}", page.words)
    outside = [unquote(link) for link in page.links]
    assert sorted(set(outside)) == ["a/report.html", "b & <c>/seed 0/report.html"]
    assert all(
        (tmp_path / link).is_file() and (tmp_path / link).with_suffix(".png").is_file() for link in outside
    )


def test_each_run_of_a_bar_is_a_dot_where_its_number_is(tmp_path):
    """On the page a dot's place is a share of the way between two ends, which all bars of a question have in common."""
    place, points = paired_results(tmp_path)
    page = write_overview(read_study(place), tmp_path / "page")[0].read_text()
    bars = re.findall(r"<span>([^<]+)</span>\s*<div [^>]*style=\"([^\"]*)\"><hr><b></b>(.*?)</div>", page)
    for label, values in points.items():
        (style, dots), *_ = [bar[1:] for bar in bars if bar[0] == label]
        at = [float(share) for share in re.findall(r"--at: ([\d.e-]+)", dots)]
        level, mean = (float(re.search(rf"--{name}: ([\d.e-]+)", style)[1]) for name in ("level", "mean"))
        assert len(at) == len(values)
        scale = (mean - level) / np.mean(values)
        assert scale > 0 and at == pytest.approx([level + scale * value for value in values], abs=1e-6)


def test_the_picture_of_a_question_has_a_dot_for_each_run_at_its_number(tmp_path, monkeypatch):
    drawn, (place, points) = [], paired_results(tmp_path)
    figure_of = drawing._figure

    @contextlib.contextmanager
    def kept(*args, **options):
        with figure_of(*args, **options) as figure:
            drawn.append(figure)
            yield figure

    monkeypatch.setattr(drawing, "_figure", kept)
    for finding in findings.answers(list(read_study(place).runs.values())).findings[:2]:
        drawing.bars(finding, tmp_path / "picture")
    for figure in drawn:
        (axes,) = figure.axes
        rows = {text.get_text().split("   ")[0]: row for row, text in enumerate(axes.get_yticklabels())}
        dots = [line for line in axes.lines if line.get_linestyle() == "None" and line.get_markersize() == 3]
        found = {
            label: next(line for line in dots if line.get_ydata()[0] == row) for label, row in rows.items()
        }
        for label in rows.keys() & points.keys():
            assert found[label].get_xdata() == pytest.approx(points.pop(label), abs=1e-6)
    assert not points


OLD = Path(__file__).parents[2] / "fixtures/old_run/run"


def test_a_run_of_an_earlier_version_is_listed_and_read_among_others(tmp_path):
    """Written by commit facd658: its numbers and what was said are those of its files."""
    full_run(tmp_path / "new", steps=20)
    shutil.copytree(OLD, tmp_path / "old")
    study = read_study(tmp_path)
    assert list(study.runs) == ["new", "old"] and study.unread == []
    path, study = write_overview(study)
    page = Page(path)
    assert list(study.runs) == ["new", "old"] and study.unread == [] and "2 runs." in page.words
    assert {"new/report.html", "old/report.html"} == {unquote(link) for link in page.links}
    assert "old tiny 2/2 0.0% 0.0 – 49.0%" in page.words
    own = Page(tmp_path / "old" / "report.html")
    lines = [json.loads(line) for line in (OLD / "metrics.jsonl").read_text().splitlines()]
    reward = next(panel for panel in own.data["panels"] if panel["title"].startswith("Reward"))["lines"]
    assert [line["steps"] for line in reward] == [[1, 2]] * len(reward)
    length = next(panel for panel in own.data["panels"] if panel["title"].startswith("Completion length"))
    for line in length["lines"]:
        values = [of_step[f"role/{line['name']}/length"] for of_step in lines]
        assert line["values"] == pytest.approx(values, rel=1e-4)
    table = read_episodes(OLD / "episodes" / "step-000002.jsonl.gz")
    trained = own.said["files"].index({"kind": "training", "step": 2})
    shown = [one for one in own.said["episodes"] if one["f"] == trained]
    calls = [call for one in shown for call in one["calls"]]
    assert len(shown) == 4 and [call["x"] for call in calls] == [text.strip() for text in table.text]
    assert [(call["w"], call["v"]) for call in calls] == [*zip(table.reward, table.advantage)]


def test_a_run_whose_own_page_fails_is_named_and_the_others_have_theirs(tmp_path):
    odd = evaluation(3, 0.5, roles={"generator": {"accuracy": "high"}})
    for name, last in (("odd", odd), ("sound", evaluation(3, 0.5))):
        write_run(tmp_path / name, lines=[metrics(3)], evaluations=[evaluation(0, 0.4), last])
    page = Page(write_overview(read_study(tmp_path))[0])
    assert "1 runs." in page.words and set(page.links) == {"sound/report.html"}
    assert re.search(r"odd' has no page, because a value in it is not usable: ValueError", page.words)


@pytest.mark.long
def test_the_script_compares_runs_in_the_terminal_and_tells_what_it_cannot_read(tmp_path):
    root, page = tmp_path / "runs", tmp_path / "page"
    along = [evaluation(0, 0.4), *(evaluation(k, 0.5) for k in (1, 2))]
    for seed in (0, 1):
        about = config(steps=3)
        about["config"]["seed"] = seed
        write_run(root / f"seed-{seed}", about=about, lines=[metrics(3)], evaluations=along)
    for name in ("metrics.jsonl", "eval.jsonl"):
        (write_run(root / f"odd {name}", lines=[metrics(1)]) / name).write_text("{]\n")
    done = script(f"--root={root}", f"--out={page}")
    assert done.returncode == 0 and done.stdout.endswith(f"{page / 'report.html'}\n"), done.stderr
    for name in ("metrics.jsonl", "eval.jsonl"):
        assert f"odd {name}/{name}' holds a line that is no JSON object with a step" in done.stderr
    for line in ("Cells", "2 of 3 evaluations"):  # why there is no peak
        assert line in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines()[:-1])


@pytest.mark.long
def test_runs_that_cannot_be_compared_are_listed_in_the_terminal(tmp_path):
    for seed, steps in enumerate((3, 4)):
        about = config(steps=steps)
        about["config"]["seed"] = seed
        lines = [metrics(steps)]
        write_run(tmp_path / f"seed-{seed}", about=about, lines=lines, evaluations=[evaluation(0, 0.4)])
    printed = script(f"--root={tmp_path}").stdout
    assert "Runs\n" in printed and "3/3" in printed and "have no seed in common" in printed


@pytest.mark.long
def test_many_runs_have_a_curve_for_each_cell_and_titles_that_tell_them_apart(tmp_path):
    for cell, height in (("voting-isolated-s-math", 0.2), ("voting-isolated-s-math+votes6", 0.4)):
        for seed in range(5):
            about = config(steps=2)
            about["config"] |= {
                "seed": seed,
                "workflow": {"name": "voting", "settings": {"votes": 6 if "votes6" in cell else 3}},
            }
            along = [evaluation(step, height + 0.1 * seed) for step in (0, 1, *([2] if seed else []))]
            write_run(
                tmp_path / cell / f"seed-{seed}",
                about=about,
                lines=[metrics(2, episodes=None)],
                evaluations=along,
            )
    page = Page(write_overview(read_study(tmp_path))[0])
    assert (
        "A line for each cell, the mean of its 5 runs with a band from the lowest to the highest, of 128 problems"
        in page.words
    )
    assert "the lowest to the highest; a name below" in page.words  # of rewards, which rest on no such number
    assert "on 128 validation problems" in page.words
    panel = page.data["panels"][0]
    assert [(line["name"], line["steps"]) for line in panel["lines"]] == [
        ("voting-isolated-s-math", [0, 1]), ("voting-isolated-s-math+votes6", [0, 1]),
    ]  # fmt: skip
    assert [line["values"][0] for line in panel["lines"]] == pytest.approx([0.4, 0.6])
    assert [line["low"][0] for line in panel["lines"]] == pytest.approx([0.2, 0.4])
    assert [line["high"][0] for line in panel["lines"]] == pytest.approx([0.6, 0.8])
    own = (tmp_path / "voting-isolated-s-math+votes6/seed-3/report.html").read_text()
    assert "<title>voting-isolated-s-math+votes6, seed 3</title>" in own


def test_the_pages_of_a_study_are_written_from_one_reading(tmp_path):
    folder = write_run(tmp_path / "run", lines=[metrics(1)], evaluations=[evaluation(0, 0.4)])
    study = read_study(tmp_path)
    (folder / "metrics.jsonl").write_text("{]\n")
    assert "40.0%" in write_overview(study)[0].read_text() and not study.unread


def test_a_folder_without_runs_and_a_run_given_as_root_are_told(tmp_path):
    with pytest.raises(FolderError, match="there is no run in or below"):
        read_study(tmp_path)
    folder = write_run(tmp_path / "run", lines=[metrics(1)])
    with pytest.raises(FolderError, match="is itself a run: give --workdir="):
        read_study(folder)
    with pytest.raises(FolderError, match="train it first"):
        write_report(tmp_path)


def script(*arguments):
    command = [sys.executable, "-m", "experiments.report", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.long
def test_the_script_prints_where_the_page_is_or_one_line_of_what_is_wrong(tmp_path):
    folder = write_run(tmp_path / "run", lines=[metrics(1)])
    done = script(f"--workdir={folder}")
    assert (done.returncode, done.stdout) == (0, f"{folder / 'report.html'}\n"), done.stderr
    failed = script(f"--workdir={tmp_path}")
    assert failed.returncode == 2 and failed.stderr.count("\n") == 1 and "there is no run in" in failed.stderr


def test_the_page_tells_where_the_time_went_part_by_part(tmp_path):
    parts = {
        "time/wall": 10.0,
        "time/rollout/prefill": 1.0,
        "time/rollout/decode": 3.0,
        "time/rollout/host": 1.0,
    }
    drawn = {2: {"draws/tokens": 70_000}}  # also of the draws that were dropped
    lines = [metrics(step, tokens=9_000, **parts, **drawn.get(step, {})) for step in (1, 2)]
    run = read_run(write_run(tmp_path / "run", lines=lines))
    facts = {row[0]: row[1] for row in run_tables.what_it_was(run).rows}
    assert "rollout 50% (prefill 10%, decode 30%, host 10%); grade 4%; learn 25%" in facts["took"]
    assert facts["took"].endswith("79,000 sampled tokens")
    few = dataclasses.replace(run, about={**run.about, "made": {"seconds": 600.0}})  # compact results
    assert dict(run_tables.what_it_was(few).rows)["took"] == "10.0 min in steps"
