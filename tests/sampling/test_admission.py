"""Who is admitted, and which histories lie there when a later turn comes: the host's decisions alone, no model."""

import collections
import random

import pytest

from benchmarks import MAX_NEW, Unannounced
from marl_jax.models import ModelConfig
from marl_jax.sampling import EngineSettings, Load, Request, plan
from marl_jax.sampling.admission import Admission, Feed, Waiting
from marl_jax.sampling.prefixes import Prefixes

MODEL = ModelConfig.preset("xs")


def admission(prefixes, lengths=(64,)):
    return Admission(
        EngineSettings(widths=(8,), lengths=lengths, chunks=(16,), prefill_tokens=64, prefixes=prefixes)
    )


def submit(queue, *tokens, ticket=0, policy="a", new=8):
    request = Request(tokens, (ticket,), new, policy)
    queue.submit(Waiting(ticket, request, 0))


def tickets(wave):
    return [waiting.ticket for _, _, waiting in wave.seats]


def test_lanes_are_filled_in_the_order_of_arrival_and_equal_prompts_are_fed_once():
    queue = admission(prefixes=4)
    for ticket in range(3):
        submit(queue, 1, 2, 3, ticket=ticket)
    submit(queue, 1, 2, 3, ticket=3, policy="b")
    wave = queue.wave([5, 2])
    assert [(lane, waiting.ticket) for lane, _, waiting in wave.seats] == [(5, 0), (2, 1)]
    assert wave.feeds[0] == Feed(wave.seats[0][1], (1, 2), 0, 0) and wave.seats[0][1] == wave.seats[1][1]
    wave = queue.wave([0, 1, 2])
    assert tickets(wave) == [2, 3] and not wave.feeds  # the other policy's prompt filled a row of the prefill
    assert wave.seats[0][1] != wave.seats[1][1]
    assert len(queue) == 0 and not queue.wave([0]).seats


def test_a_wave_takes_as_many_prompts_as_there_are_rows():
    queue = admission(prefixes=2)
    for ticket in range(3):
        submit(queue, ticket, 2, 3, ticket=ticket)
    assert tickets(queue.wave(range(8))) == [0, 1]
    assert tickets(queue.wave(range(8))) == [2]


def test_a_history_is_fed_on_where_it_lies():
    queue = admission(prefixes=4)
    row = queue.keep("a", (1, 2, 3))
    submit(queue, 1, 2, 3, 4, 5, 6)
    wave = queue.wave([0])
    assert wave.feeds == [Feed(row, (4, 5), 3, 0)] and not wave.moves


def test_prompts_that_branch_from_one_history_each_get_it():
    queue = admission(prefixes=4)
    row = queue.keep("a", (1, 2, 3))
    for ticket in range(3):
        submit(queue, 1, 2, 3, 4 + ticket, 5, ticket=ticket)
    wave = queue.wave(range(8))
    assert {feed.start for feed in wave.feeds} == {3} and len({feed.row for feed in wave.feeds}) == 3
    assert [source for source, _ in wave.moves] == [row, row]  # the last one takes the row itself
    assert wave.feeds[-1].row == row


@pytest.mark.parametrize("rows", [1, 2])
def test_branches_enter_one_after_the_other_where_rows_are_short(rows):
    queue = admission(prefixes=rows)
    queue.keep("a", (1, 2, 3))
    for ticket in range(3):
        submit(queue, 1, 2, 3, 4 + ticket, 5, ticket=ticket)
    entered = []
    while len(queue):
        wave = queue.wave(range(8))
        assert wave.seats, "nobody can enter any more"
        entered += tickets(wave)
    assert entered == [0, 1, 2]


def test_a_history_that_a_prompt_waits_for_outlives_newer_ones():
    queue = admission(prefixes=2)
    kept = queue.keep("a", (1, 2, 3))
    submit(queue, 1, 2, 3, 4, 5)
    newer = [queue.keep("a", (9, number)) for number in range(5)]
    assert kept not in newer and None not in newer  # they take the other row from each other
    assert queue.wave([0]).feeds == [Feed(kept, (4,), 3, 0)]


def test_no_history_is_kept_where_every_row_is_waited_for():
    queue = admission(prefixes=1)
    kept = queue.keep("a", (1, 2, 3))
    submit(queue, 1, 2, 3, 4, 5)
    assert queue.keep("a", (7, 8)) is None
    assert queue.wave([0]).feeds == [Feed(kept, (4,), 3, 0)]


def test_a_prompt_that_becomes_a_history_gives_up_its_own():
    """A history continued by a prompt that is itself kept, and gone on from, while it still waits once more."""
    queue = admission(prefixes=2)
    owner, first, second = "a", (1, 2, 3), (1, 2, 3, 4)
    row = queue.keep(owner, first)
    for ticket in range(2):
        submit(queue, *second, 5, ticket=ticket)
    assert queue.wave([0]).feeds == [Feed(row, (4,), 3, 0)]
    assert queue.keep(owner, second) is None  # it lies there
    submit(queue, *second, 6, 7, ticket=2)  # goes on from what the other one still waits for
    assert tickets(queue.wave([0, 1])) == [1, 2]
    for number in range(4):  # nobody waits for anything: both rows can be had
        assert queue.keep(owner, (9, number)) is not None
    assert len({queue.keep(owner, (8, number)) for number in range(2)}) == 2


def test_another_policys_history_is_never_gone_on_from():
    queue = admission(prefixes=4)
    queue.keep("a", (1, 2, 3))
    queue.keep(("b", 1), (1, 2, 3))  # of another update
    submit(queue, 1, 2, 3, 4, 5, policy="b")
    (feed,) = queue.wave([0]).feeds
    assert (feed.tokens, feed.start) == ((1, 2, 3, 4), 0)


def test_a_long_prompt_is_hashed_only_for_histories_that_end_as_it_goes_on():
    class Prompt(tuple):
        """Tokens that count their beginnings: each is copied and hashed."""

        beginnings = 0

        def __getitem__(self, index):
            Prompt.beginnings += isinstance(index, slice)
            return super().__getitem__(index)

    prefixes = Prefixes(200)
    for length in range(1, 101):
        prefixes.add(("a", (*range(length), 1000)), set(), kept=True)
    row = prefixes.add(("a", tuple(range(50))), set(), kept=True)
    assert prefixes.longest(("a", Prompt(range(500)))) == (row, 50)
    assert Prompt.beginnings <= 2


def test_the_rollout_benchmark_does_not_announce_the_lengths_that_it_imposes():
    settings = EngineSettings((8,), lengths=(16, 32, 80), chunks=(16,), prefill_tokens=64, prefixes=4)
    entered = []
    for kind in (Admission, Unannounced):
        queue = kind(settings)
        submit(queue, *range(8), ticket=0, new=MAX_NEW)
        submit(queue, *range(8), ticket=1)
        entered.append(tickets(queue.wave([0, 1])))
    assert entered == [[1, 0], [0, 1]]  # announced, a request waits for shorter ones


@pytest.mark.parametrize(("share", "low", "high"), [(0, 2, 3), (0.5, 1, 2), (1, 1, 1.01)])
def test_planned_histories_are_found_under_load(share, low, high):
    """512 episodes of three rounds between two roles over 32 lanes: longer turns wait for the shorter ones.

    Where all have room, what is fed is what is new.
    """
    lanes, roles, ahead = 32, 2, 64
    histories = round(share * roles * ahead)
    settings = plan(MODEL, Load(320, 64, min_prompt=8, histories=histories), lanes=lanes)
    queue, rng = Admission(settings), random.Random(0)
    turns: dict[int, list[tuple[int, ...]]] = {}  # episode -> its roles' histories
    seated: list[tuple[Waiting, int]] = []
    due = collections.Counter()  # episode -> calls made
    started, fed, fresh = 0, 0, 0

    def words(n):
        return tuple(rng.randrange(500) for _ in range(n))

    def call(episode):
        nonlocal fresh
        before = turns[episode][due[episode] % roles]
        prompt = (*before, *words(20))
        fresh += len(prompt) - 1 - max(0, len(before) - 1)  # the last token of a turn is not cached yet
        request = Request(prompt, (episode, due[episode]), 64, keep=True)
        queue.submit(Waiting(episode, request, -1))

    while started < 512 or len(queue) or seated:
        while started < 512 and len(queue) + len(seated) < ahead:
            turns[started] = [()] * roles
            call(started)
            started += 1
        while (wave := queue.wave(range(lanes - len(seated)))).seats:
            fed += sum(len(feed.tokens) for feed in wave.feeds)
            seated += [(waiting, rng.randint(1, 10)) for _, _, waiting in wave.seats]
        ended = [waiting for waiting, left in seated if left == 1]
        seated = [(waiting, left - 1) for waiting, left in seated if left > 1]
        for waiting in ended:
            said = (*waiting.request.tokens, *words(rng.randint(1, 20)))
            queue.keep(waiting.request.policy, said[:-1])
            episode = waiting.ticket
            turns[episode][due[episode] % roles] = said
            due[episode] += 1
            if due[episode] < 6:
                call(episode)
    assert low * fresh <= fed < high * fresh
