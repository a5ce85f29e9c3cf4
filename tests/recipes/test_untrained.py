"""Who talks when in the recipes that are not trained, on calls that say what is given."""

import driven
from by_hand import TASK

from marl_jax.workflows import load_prompts
from recipes import speakers, untrained

# ---------------------------------------------------------------- untrained, speakers


def drive(flow, said, words=None):
    """The roles that are asked, and what is returned, where the calls say this in turn; read by their box.

    What they are shown is added to `words`.
    """
    texts, script = iter(said), flow(TASK, load_prompts("math", "micro"))
    calls, end = driven.drive(script, lambda call, before: next(texts))
    if words is not None:
        words += [call.messages[-1]["content"] for call in calls]
    return [(call.role, call.slot) for call in calls], end.answer


def boxes(*words):
    return [f"\\boxed{{{word}}}" for word in words]


def test_debaters_talk_only_where_they_differ():
    asked, answer = drive(untrained.conditional_debate, boxes(2, 2, 2))
    assert len(asked) == 3 and answer == "2"
    asked, answer = drive(untrained.conditional_debate, boxes(2, 3, 3, 2, 2, 3))
    assert len(asked) == 6 and answer == "2"


def test_the_least_like_the_others_hears_the_most_like_them():
    asked, answer = drive(untrained.likeness, [*boxes(2, 2), "what? \\boxed{777}", *boxes(2)])
    assert asked[3:] == [("debater", 2)] and answer == "2"
    assert len(drive(untrained.likeness, boxes(2, 2, 2))[0]) == 3


def test_states_follow_from_verdicts():
    asked, answer = drive(untrained.states, boxes(3, "Incorrect", 2, "Correct"))
    assert [role for role, _ in asked] == ["debater", "judge", "debater", "judge"] and answer == "2"
    assert len(drive(untrained.states, boxes(3, "Incorrect", 4, "Incorrect", 5))[0]) == 5


def test_the_next_speaker_is_chosen_until_it_is_done():
    """The second way first, then the end; three answers at most; the first way where nothing can be read."""
    asked, answer = drive(speakers.chosen, boxes(2, 7, 3))
    assert [role for role, _ in asked] == ["chooser", "speaker", "chooser"] and answer == "7"
    assert len(drive(speakers.chosen, boxes(1, 4, 2, 5, 1, 6))[0]) == 6
    assert drive(speakers.chosen, ["what?", *boxes(8, 3)])[1] == "8"
    assert drive(speakers.chosen, boxes(3, 8, 3))[1] == "8"  # done before anything is said: it begins


def test_the_highest_bid_speaks():
    words = []
    asked, answer = drive(speakers.auction, boxes(4, 6, 85), words)
    assert [role for role, _ in asked] == ["bidder", "bidder", "speaker"] and answer == "85"
    assert "parts" in words[-1] and "columns" in words[0]
    drive(speakers.auction, boxes(5, 5, 1), words := [])
    assert "columns" in words[-1]  # of equal bids the first
    assert len(drive(speakers.in_turn, boxes(1, 2))[0]) == 2
