"""The live view shows a run on a terminal in place, elsewhere in lines, and never gets in the run's way."""

import contextlib
import io
import re

import pytest

from marl_jax.alarms.watch import judge
from marl_jax.rollouts import Progress
from marl_jax.terminal import live
from marl_jax.terminal.live import Live

ROLES = ("generator", "aggregator")


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    """A stream that says it is a terminal; `screen()` plays what was written like one of so many columns."""

    encoding = "utf-8"

    def __init__(self, columns=80):
        super().__init__()
        self.columns = columns

    def isatty(self):
        return True

    def screen(self):
        rows, row, column = [""], 0, 0
        for token in re.findall(r"\033\[\??\d*[A-Za-z]|.|\n|\r", self.getvalue()):
            if token == "\n":
                row, column = row + 1, 0
                rows += [""] * (row + 1 - len(rows))
            elif token == "\r":
                column = 0
            elif token == "\033[K":
                rows[row] = rows[row][:column]
            elif token == "\033[J":
                rows[row:] = [rows[row][:column]]
            elif match := re.fullmatch(r"\033\[(\d+)A", token):
                row -= int(match[1])
                assert row >= 0, "above the screen"
            else:
                assert not token.startswith("\033"), token
                if column == self.columns:
                    row, column = row + 1, 0
                    rows += [""] * (row + 1 - len(rows))
                rows[row] = rows[row][:column].ljust(column) + token + rows[row][column + 1 :]
                column += 1
        assert (row, column) == (len(rows) - 1, 0), "the cursor rests at the start of the line below"
        return rows[:-1]


@pytest.fixture(autouse=True)
def terminal_kind(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")


def metrics(reward=0.55, **more):
    return {
        "reward": reward,
        "reward/generator": 0.524,
        "reward/aggregator": 0.61,
        "time/tokens_per_second": 3054.4,
        **more,
    }


def evaluation(step, accuracy, **more):
    values = {"step": step, "split": "val", "mode": "trained", "accuracy": accuracy, "problems": 64}
    return {**values, "ci_low": accuracy - 0.05, "ci_high": accuracy + 0.07, "difference": None, **more}


def run(view, clock, steps, seconds=8.0):
    for step in steps:
        clock.now += seconds
        view.step(step, metrics())


# ---------------------------------------------------------------- on a terminal


def test_a_frozen_role_has_no_reward_to_show():
    stream = io.StringIO()
    Live(2, ROLES, stream, Clock(), frozen=["aggregator"]).step(1, metrics())
    assert "reward 0.55, generator 0.52, aggregator frozen, " in stream.getvalue()


IDLE = {
    f"groups/aggregator/{name}": count
    for name, count in (("groups", 4), ("singletons", 4), ("zero_variance", 0))
}


def test_a_terminal_shows_where_the_run_is(monkeypatch):
    clock, stream = Clock(), Terminal(100)
    monkeypatch.setenv("COLUMNS", "100")
    view = Live(200, ROLES, stream, clock)
    view.evaluation(evaluation(0, 0.42))
    clock.now += 92.0  # compilation
    view.step(1, metrics())
    run(view, clock, range(2, 51))
    view.evaluation(evaluation(40, 0.6))
    view.evaluation(evaluation(50, 0.58, difference={"mean": 0.16, "low": 0.08, "high": 0.234}))
    clock.now += 1
    view.rollout(Progress(episodes=512, done=212, calls=400, tokens=9000, seconds=3.0))
    assert stream.screen() == [
        "step 0: val accuracy 42.0% (37.0 .. 49.0), 64 problems",
        "step 40: val accuracy 60.0% (55.0 .. 67.0), 64 problems",
        "step 50: val accuracy 58.0% (53.0 .. 65.0), 64 problems, +16.0 points (+8.0 .. +23.4) over base",
        "step      50/200 |#######-----------------------|  25%",
        "now       sampling 212/512 episodes, 133 calls/s, 3000 tokens/s",
        "accuracy  58.0% (53.0 .. 65.0) at step 50, base 42.0%, best 60.0% at step 40",
        "curve     ▁█▇ 42.0% .. 60.0%",
        "reward    0.55   generator 0.52   aggregator 0.61",
        "time      8.0 s a step, about 20 min left, 3,054 tokens/s",
    ]


def test_an_alarm_is_told_when_it_begins_and_stands_there_while_it_holds():
    clock, stream = Clock(), Terminal()
    view = Live(100, ROLES, stream, clock)
    watch = judge([{"step": step, **IDLE} for step in (1, 2, 3)])
    view.alarms(watch.alarms, watch.holding)
    run(view, clock, (3, 4))
    assert stream.screen()[0].startswith("ALARM at step 3: nothing to learn (aggregator): 100% of 12 groups")
    shown = [line for line in stream.screen() if not line.startswith("ALARM")]
    assert shown[shown.index("now       ") + 1] == "alarms    nothing to learn (aggregator) since step 3"
    view.alarms([], [])
    others = [view.for_seed(f"seed {seed}") for seed in (1, 2, 3)]
    for other in others:
        other.alarms(watch.alarms, watch.holding)
    run(view, clock, (5,))
    told = "nothing to learn (aggregator) since step 3"
    assert [line for line in stream.screen() if line.startswith("alarms")] == [
        f"alarms    seed {seed}: {told}" for seed in (1, 2, 3)
    ]
    for other in others:
        other.alarms([], [])
    run(view, clock, (6,))
    assert not any(line.startswith("alarms") for line in stream.screen())


def test_the_time_left_follows_recent_steps_not_the_compilation():
    clock, stream = Clock(), Terminal()
    view = Live(100, ROLES, stream, clock)
    clock.now += 600
    view.step(1, metrics())
    assert stream.screen()[-1] == "time      first step 10 min, 3,054 tokens/s"  # which compiled
    clock.now += 10
    view.step(2, metrics())
    assert stream.screen()[-1].startswith("time      10 s a step, about 16 min left")
    run(view, clock, range(3, 90), seconds=2.0)
    assert stream.screen()[-1].startswith("time      2.0 s a step, about 22 s left")


def test_a_resumed_run_counts_from_where_it_is():
    clock, stream = Clock(), Terminal()
    view = Live(100, ROLES, stream, clock)
    run(view, clock, (91, 92), seconds=3.0)
    first, *_, last = stream.screen()
    assert first.startswith("step      92/100 |" + "#" * 27 + "---|  92%")
    assert last.startswith("time      3.0 s a step, about 24 s left")


def test_a_resumed_run_shows_what_it_had_reached():
    stream = Terminal()
    view = Live(100, ROLES, stream, Clock())
    view.resumed(90, metrics(0.5), [evaluation(0, 0.42), evaluation(40, 0.6), evaluation(80, 0.58)])
    assert stream.screen()[:1] == ["resumed after step 90"]
    assert [line.rstrip() for line in stream.screen()[1:5]] == [
        "step      90/100 |###########################---|  90%",
        "now",
        "accuracy  58.0% (53.0 .. 65.0) at step 80, base 42.0%, best 60.0% at step 40",
        "curve     ▁█▇ 42.0% .. 60.0%",
    ]
    assert stream.screen()[5].startswith("reward    0.50")


def test_dispatches_redraw_ten_times_a_second_at_most_and_always_at_the_end():
    clock, stream = Clock(), Terminal()
    view = Live(10, ROLES, stream, clock)
    view.step(1, metrics())
    clock.now += 1
    written = len(stream.getvalue())
    drawn = 0
    for done in range(1000):
        clock.now += 0.001
        view.rollout(Progress(episodes=1000, done=done, seconds=1.0))
        drawn += len(stream.getvalue()) > written
        written = len(stream.getvalue())
    assert 9 <= drawn <= 11
    view.rollout(Progress(episodes=1000, done=1000, seconds=1.0))
    assert stream.screen()[1].startswith("now       sampling 1000/1000 episodes")


def test_the_phase_is_shown_until_the_next():
    stream = Terminal()
    view = Live(10, ROLES, stream, Clock())
    view.phase("evaluating")
    view.rollout(Progress(episodes=4, done=4, seconds=1.0))
    assert stream.screen()[1].startswith("now       evaluating 4/4 episodes")
    view.phase("learning")
    assert stream.screen()[1] == "now       learning"
    view.step(1, metrics())
    assert stream.screen()[1] == "now       "


@pytest.mark.parametrize("columns", [4, 20, 45, 79])
def test_no_line_is_wider_than_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal(columns)
    view = Live(1000, ("оценщик", "生成器" * 20), stream, Clock())
    for step in (1, 2, 3):
        view.step(step, {"reward/生成器": 1.0})
        view.evaluation(evaluation(step, 0.5))
    lines = re.findall(r"\033\[K(.*)\n", stream.getvalue())[-5:]
    assert len(lines) == 5
    for line in lines:
        assert sum(2 if "一" <= c <= "鿿" else 1 for c in line) < columns


def test_a_terminal_that_became_narrower_is_wiped_clean(monkeypatch):
    stream = Terminal(80)
    view = Live(10, ROLES, stream, Clock())
    view.step(1, metrics())
    monkeypatch.setenv("COLUMNS", "20")
    wrapped = sum(-(-len(line) // 20) for line in stream.screen())
    view.step(2, metrics())
    assert f"\033[{wrapped}A" in stream.getvalue() and wrapped > 3


def test_a_low_terminal_shows_the_first_lines(monkeypatch):
    monkeypatch.setenv("LINES", "3")
    stream = Terminal()
    view = Live(10, ROLES, stream, Clock())
    for step in (1, 2, 3):
        view.step(step, metrics())
    assert [line[:8] for line in stream.screen()] == ["step    ", "now     "]
    monkeypatch.setenv("LINES", "4")
    watch = judge([{"step": step, **IDLE} for step in (1, 2, 3)])
    view.alarms(watch.alarms, watch.holding)
    view.step(4, metrics())
    assert stream.screen()[-1].startswith("alarms")


def test_notes_stay_above_and_hold_nothing_that_a_terminal_obeys():
    stream = Terminal()
    view = Live(10, ROLES, stream, Clock())
    view.step(1, metrics())
    view.note("resumed at step 1")
    view.note("warning: \033[2J\a\nline two\rline three")
    view.step(2, metrics())
    shown = stream.screen()
    assert shown[:4] == ["resumed at step 1", "warning:  [2J ", "line two", "line three"]
    assert shown[4].startswith("step      2/10")


def test_an_exception_leaves_the_last_state_and_a_clean_line_below():
    stream = Terminal()
    with pytest.raises(KeyboardInterrupt), contextlib.closing(Live(10, ROLES, stream, Clock())) as view:
        view.step(1, metrics())
        view.rollout(Progress(episodes=4, done=1, seconds=1.0))
        raise KeyboardInterrupt
    stream.write("Traceback\n")
    assert stream.screen()[-1] == "Traceback"
    assert stream.screen()[0].startswith("step      1/10")
    # The cursor was never hidden: nothing to restore after a kill.
    assert "\033[?25l" not in stream.getvalue()


def test_nothing_is_written_after_closing():
    stream = Terminal()
    view = Live(10, ROLES, stream, Clock())
    view.step(1, metrics())
    view.close()
    end = stream.getvalue()
    view.close()
    view.note("late")
    view.step(2, metrics())
    view.rollout(Progress(episodes=1, done=1, seconds=1.0))
    assert stream.getvalue() == end


# ---------------------------------------------------------------- anywhere else


def test_elsewhere_steps_are_lines_ten_seconds_apart_and_every_evaluation_is_one():
    clock, stream = Clock(), io.StringIO()
    with contextlib.closing(Live(30, ROLES, stream, clock)) as view:
        view.evaluation(evaluation(0, 0.42))
        run(view, clock, range(1, 31), seconds=4.0)
        view.evaluation(evaluation(30, 0.5))
    lines = stream.getvalue().splitlines()
    steps = [int(line.split("/")[0].removeprefix("step ")) for line in lines if "/30: " in line]
    assert steps == [1, 4, 7, 10, 13, 16, 19, 22, 25, 28, 30]
    assert lines[1] == (
        "step 1/30: reward 0.55, generator 0.52, aggregator 0.61, first step 4.0 s, 3,054 tokens/s"
    )
    assert lines[0].startswith("step 0: val accuracy 42.0%") and lines[-1].startswith("step 30: val accuracy")
    assert "\033" not in stream.getvalue() and "\r" not in stream.getvalue()


def test_elsewhere_a_long_rollout_says_every_minute_that_it_lives():
    clock, stream = Clock(), io.StringIO()
    view = Live(30, ROLES, stream, clock)
    for second in range(300):
        clock.now += 1
        view.rollout(Progress(episodes=1000, done=second, seconds=1.0))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("step 1/30: sampling, 59/1000 episodes")


def test_a_dumb_terminal_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    Live(10, ROLES, stream, Clock()).step(1, metrics())
    assert stream.getvalue().startswith("step 1/10: ") and "\033" not in stream.getvalue()


# ---------------------------------------------------------------- whatever comes


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_numbers_that_are_not_there_are_dashes(stream):
    view = Live(3, ROLES, stream, Clock())
    view.evaluation({"step": 0, "accuracy": None})
    view.evaluation({"step": 1, "accuracy": 0.5, "ci_low": None, "difference": {"mean": None}})
    view.step(1, {"reward": None, "reward/generator": None})
    assert "generator -" in stream.getvalue() and "accuracy -" in stream.getvalue()


class Broken(io.StringIO):
    def __init__(self, error, terminal):
        super().__init__()
        self.error, self.terminal = error, terminal

    def isatty(self):
        return self.terminal

    def write(self, text):
        raise self.error


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("I/O operation on closed file")])
def test_a_stream_that_breaks_does_not_stop_the_run(error, terminal):
    with contextlib.closing(Live(3, ROLES, Broken(error, terminal), Clock())) as view:
        view.note("hello")
        view.step(1, metrics())
        view.evaluation(evaluation(1, 0.5))


def test_a_stream_of_few_letters_gets_what_it_can_hold():
    raw = io.BytesIO()
    view = Live(3, ("оценщик",), io.TextIOWrapper(raw, encoding="ascii"), Clock())
    view.step(1, {"reward/оценщик": 0.5})
    assert b"??????? 0.50" in raw.getvalue()
    assert view._curve([0.1, 0.9]) == ""
    assert Live(3, ROLES, Terminal(), Clock())._curve([0.1, 0.9]) == "▁█ 10.0% .. 90.0%"


def test_what_takes_most_of_a_step_is_named():
    stream = Terminal()
    clock = Clock()
    view = Live(100, ROLES, stream, clock)
    clock.now += 8
    view.step(1, metrics(**{"time/rollout": 3.0, "time/learn": 5.0, "time/other": 0.0, "time/step": 8.0}))
    assert "first step 8.0 s, 62% of it learn" in stream.screen()[-1]
    view = Live(100, ROLES, stream, clock)
    clock.now += 180  # most of which the run was opened in, which is no part of a step
    view.step(1, metrics(**{"time/evaluate": 14.4, "time/learn": 0.6, "time/wall": 15.0}))
    assert "first step 15 s, 96% of it evaluate" in stream.screen()[-1]


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.5, "0.5 s"),
        (59.4, "59 s"),
        (90, "2 min"),
        (3600, "1 h 00 min"),
        (7560, "2 h 06 min"),
        (2e5, "2.3 days"),
    ],
)
def test_durations_are_read_at_a_glance(seconds, text):
    assert live._duration(seconds) == text


def test_steps_without_a_good_episode_are_told_where_their_error_is_a_new_one():
    stream = io.StringIO()
    view = Live(9, ("generator",), stream)
    steps = (["a", "b"], ["a", "a"], [None, "a"], [None, "c"], ["c", "c"], [])
    for step, errors in enumerate(steps, 1):
        view.failures(step, errors)
    assert not [line for line in view._lines() if line.startswith("errors")]
    view.failures(7, ["d"])
    assert view._lines()[2] == "errors    in all episodes, the first: d"
    told = "step {}: every episode ended in an error, the first: {}\n".format
    some = "step 3: 1 of 2 episodes ended in an error, the first: a; `failed` counts them\n"
    assert stream.getvalue() == told(1, "a") + some + told(5, "c") + told(7, "d")
    view = Live(9, ("generator",), stream := io.StringIO())
    view.failures(1, ["a", None, None], "path")
    assert stream.getvalue().startswith("step 1: 1 of 3 paths ended in an error")
