"""What recipes pay and measure where a role proposes the problems, on episodes made by hand."""

import dataclasses
import itertools
from pathlib import Path

import driven
import numpy as np
import pytest
from by_hand import TASK, call, episode, kept, table_of

from marl_jax.learning.estimators.worth import AdvantageConfig, with_advantages
from marl_jax.task import Task
from marl_jax.tasks import micro
from recipes import absolute_zero, dr_zero, r_zero, self_play_repair, spell, sums
from recipes.recipe import Trained
from recipes.run import of_arm

# ---------------------------------------------------------------- absolute_zero


def test_what_is_written_is_executed_and_its_answer_is_computed():
    asked = [sums.executed(kind, "12-4") for kind in ("deduction", "abduction", "induction")]
    if asked[0] is None:
        pytest.fail("12-4 is held out: choose another example")
    assert [(one.question, one.gold) for one in asked] == [
        ("12-4=?", "8"), ("12-x=8, x=?", "4"), ("5>1, 11>7, 12>?", "8"),
    ]  # fmt: skip
    for text in ("", "12", "12+", "123+4", "3-9", "12*4", "12-4=8", "__import__('os')"):
        assert sums.executed("deduction", text) is None
    assert len({one.id for one in asked}) == 3


def test_what_is_held_out_are_the_problems_of_val_and_test():
    for split, known in (("train", False), ("val", True), ("test", True)):
        for task in itertools.islice(micro.stream("micro_math", split, levels=(1,)), 20):
            assert sums.is_held_out(task.meta["kind"], *task.meta["terms"]) == known


def test_no_problem_of_the_test_split_can_be_proposed():
    refused = [
        f"{a}+{b}" for a in range(40) for b in range(40) if sums.executed("deduction", f"{a}+{b}") is None
    ]
    assert 0.1 < len(refused) / 1600 < 0.3  # two of ten splits


@pytest.mark.parametrize(
    "rates, paid", [((1, 1, 1, 1), -0.5), ((0, 0, 0, 0), -0.5), ((1, 0, 0, 0), 0.75), ((1, 1, 1, 0), 0.25)]
)
def test_a_proposer_is_paid_by_what_can_be_learned(rates, paid):
    probes = [call("probe", answer="1", kind="solver") for _ in rates]
    made = [episode(call("proposer", answer="made/x"), *probes, answers=(None, *rates))]
    assert absolute_zero.learnability(made)[0][0] == pytest.approx(paid)
    assert (
        absolute_zero.difficulty(made)[0][0] == 1 - np.mean(rates) and absolute_zero.uniform(made)[0][0] == 1
    )


def test_a_solver_is_paid_more_for_a_wrong_answer_than_for_none():
    made = [
        episode(*(call("solver", answer=a, kind="solver") for a in ("2", "3", None)), answers=(1.0, 0.0, 0.0))
    ]
    assert absolute_zero.learnability(made) == [[1.0, -0.5, -1.0]]
    assert absolute_zero.learnability([episode(call("proposer"))]) == [[-1.0]]


# ---------------------------------------------------------------- dr_zero


def test_a_proposal_of_two_hops_is_executed_and_a_held_out_one_refused():
    made = sums.chained("12+30-5")
    if made is None:
        pytest.fail("12+30-5 is held out: choose another example")
    assert (made.question, made.gold, dr_zero.hops_of("12+30-5")) == ("12+30-5=?", "37", 2)
    assert sums.chained("12-4").gold == "8" and dr_zero.hops_of("12-4") == 1
    for text in ("", "12", "12+", "1+2+3+4", "12+30*4", "123+4+5"):
        assert sums.chained(text) is None
    for task in itertools.islice(micro.stream("micro_math", "test", levels=(1, 3)), 40):
        assert sums.chained(task.question.removesuffix("=?")) is None


def proposal(text, hops, rights, sample=0, by_hops=True):
    """A proposal and tries at it, as the workflow labels them."""
    peers = {"hops": hops, "peers": str(hops) if by_hops else ""}
    tries = [call("solver", kind="solver", slot=i, labels={"peers": text}) for i in range(len(rights))]
    answer = "made" if rights else None
    task = dataclasses.replace(TASK, id=f"shown {sample}")
    calls = (call("proposer", text, answer, labels=peers), *tries)
    return episode(*calls, sample=sample, answers=(None, *rights), task=task)


def test_a_proposer_is_paid_for_difficulty_and_form():
    """Of five tries one is right: 4/4; four: 1/4; none or all: 0. Form 1/2, and 1/4 with another number of hops."""
    tries = ([1, 0, 0, 0, 0], [1, 1, 1, 1, 0], [0] * 5, [1] * 5)
    paid = [dr_zero.paid([proposal("1+2", 1, rights)])[0] for rights in tries]
    assert [one[0] for one in paid] == [1.5, 0.75, 0.5, 0.5] and paid[0][1:] == tries[0]
    assert dr_zero.paid([proposal("1+2", 2, tries[0])])[0][0] == 1.25
    assert dr_zero.paid([proposal("1+", 1, [])]) == [[0.0]]


def test_single_proposals_are_compared_with_those_of_as_many_hops():
    """Rewards 1 and 0 of one hop, 5 and 3 of two: +-1/sqrt 2 in each group; in one group 5 is far above 1."""
    made = [proposal(f"{i}", hops, [], i) for i, hops in enumerate((1, 1, 2, 2))]
    alike = [proposal(f"{i}", hops, [], i, by_hops=False) for i, hops in enumerate((1, 1, 2, 2))]
    how = AdvantageConfig(group=dr_zero.config().advantages.group, eps=0.0)
    found = [
        with_advantages(table_of(*some, reward=[1, 0, 5, 3]), how)[0].advantage for some in (made, alike)
    ]
    assert found[0] == pytest.approx(np.array([1, -1, 1, -1]) / np.sqrt(2))
    assert found[1] == pytest.approx(np.array([-1.25, -2.25, 2.75, 0.75]) / np.std([1, 0, 5, 3], ddof=1))


def test_proposals_as_asked_are_counted():
    written = [("1+2", 1, [1]), ("1+2+3", 1, [0]), ("1+2+3", 2, [0]), ("1+", 1, [])]
    table = table_of(*(proposal(*one, i) for i, one in enumerate(written)))
    assert dr_zero.as_asked(Trained(table, also={"proposing": table})) == 0.5
    assert np.isnan(dr_zero.as_asked(Trained(table)))


# ---------------------------------------------------------------- self_play_repair

ADD = Task(
    "micro_code/x", "code", "Write f(x): add 7", level=1, meta={"chain": [["add", 7]]},
    tests=tuple({"call": "f", "args": [x], "expected": x + 7} for x in (0, 5)),
)  # fmt: skip


def program(body):
    return f"```python\ndef f(x):\n return {body}\n```"


def test_a_bug_is_a_program_that_runs_and_that_a_test_notices():
    assert self_play_repair.breaks(ADD, program("x+8"))
    raises = program("exec('raise Exception(\"wrong answer\")')")
    for said in (program("x+7"), program("x+"), program("y"), raises, "x+8", ""):
        assert not self_play_repair.breaks(ADD, said)


def test_a_bug_is_a_problem_of_its_own_with_the_tests_of_the_program():
    one, same, other = (self_play_repair.bug(ADD, program(body), 1) for body in ("x+8", "x+8", "x+9"))
    assert one == same and one.id != other.id and one.tests == ADD.tests
    assert (
        one.meta["broken"] == program("x+8")
        and "x+8" in self_play_repair._mend(one, 0).messages[0]["content"]
    )


@pytest.mark.parametrize(
    "mended, earned",
    [((1, 0, 0, 0), 0.55), ((1, 1, 1, 0), -0.35), ((0, 0, 0, 0), -0.8), ((1, 1, 1, 1), -0.8)],
)
def test_an_injector_is_paid_by_how_seldom_its_bug_is_mended(mended, earned):
    """1 - 1.8 s; the mend of a bug of the second order, a later turn, does not count."""
    mends = [call("mender", kind="solver", slot=i) for i in range(4)]
    later = call("mender", kind="solver", turn=1)
    made = episode(call("injector"), *mends, later, answers=(None, *map(float, mended), 1.0))
    paid = self_play_repair.paid([made])[0]
    assert paid[0] == pytest.approx(earned) and paid[1:] == [*(2 * m - 1 for m in mended), 1]
    assert self_play_repair.paid([episode(call("injector"))]) == [[-1.0]]


def test_a_wrong_mend_is_mended_again_and_a_program_that_is_right_is_no_bug():
    """The tool is played: the first says whether it is a bug, the second whether a mend is one."""

    def asked(task, found, said, **settings):
        flow = self_play_repair.broken_and_mended(task, None, tries=2, **settings)
        calls, _ = driven.drive(flow, lambda *_: said, run_tool=lambda *_: found.pop(0))
        return [one.role for one in calls], [one.about and one.about.meta["order"] for one in calls]

    assert asked(ADD, [False], "x") == (["injector"], [None])
    assert asked(ADD, [True, False], "x") == (["injector", "mender", "mender"], [None, 1, 1])
    assert asked(ADD, [True, True], "x")[1] == [None, 1, 1, 2]
    assert asked(self_play_repair.bug(ADD, "x", 2), [], "x")[1] == [2, 2]  # ends there
    given = asked(ADD, [], "x", given=True)
    assert given == (["mender", "mender"], [1, 1])


# ---------------------------------------------------------------- r_zero


def asked(text, said, sample=0, right=()):
    solvers = [call("solver", answer=answer, kind="solver") for answer in said]
    return episode(call("challenger", text, answer="made"), *solvers, sample=sample, answers=(None, *right))


def test_a_challenger_is_paid_for_doubt_and_pays_for_company():
    """Shares 3/5 and 1, each alone in its batch of three, one of which is no question."""
    graded = [
        asked("12+3", ["1", "1", "1", "2", None]),
        asked("98-1", ["7"] * 5, 1),
        episode(call("challenger", "x"), sample=2),
    ]
    paid = r_zero.paid(graded)
    assert paid[0] == [pytest.approx(0.4 - 1 / 3), 1, 1, 1, 0, 0] and paid[2] == [-1.0]
    assert paid[1] == [pytest.approx(-1 / 3), 1, 1, 1, 1, 1]
    assert r_zero.banded(graded)[1][1:] == [0] * 5 and r_zero.banded(graded)[0] == paid[0]


def test_small_majorities_are_trusted_less_and_may_move_further():
    """Of five answers three agree: s 0.6, weight 0.6 + 0.4 x 0.6, upper clip 0.2 + 0.1 x 0.4; all agree: 1 and 0.2."""
    calls = (call("challenger"), *(call("solver", slot=i) for i in range(5)))
    made = table_of(
        *(episode(*calls, sample=i) for i in range(2)), reward=[0.5, 1, 1, 1, 0, 0, 0.5, 1, 1, 1, 1, 1]
    )
    made = made.replace(group=np.array([0, *[1] * 5, 2, *[3] * 5]))
    found = r_zero.adpo(made)
    assert found["weight"] == pytest.approx([1, *[0.84] * 5, *[1] * 6])
    assert found["clip_high"] == pytest.approx([0.28, *[0.24] * 5, 0.28, *[0.2] * 5])


def labelled(one, advantage):
    """A table of one question, with the advantages of its answers."""
    made = table_of(one, grades=[np.nan, *one.answers[1:]])
    return made.replace(advantage=np.array([0.0, *advantage]))


def test_labels_are_measured_against_the_truth():
    good = labelled(asked("1+1", ["2", "2", "3"], right=(1.0, 1.0, 0.0)), [0.5, 0.5, -1])
    drifted = labelled(asked("1+2", ["4", "4", "3"], 1, right=(0.0, 0.0, 1.0)), [0.5, 0.5, -1])
    assert r_zero.label_accuracy([good, drifted]) == 0.5
    assert r_zero.early(kept(good, drifted)) == 1.0 and r_zero.late(kept(good, drifted)) == 0.0


def test_labels_that_raise_no_answer_count_among_all_alone():
    """One true label teaches; a false one is left out, another has the agreement of all."""
    good = labelled(asked("1+1", ["2", "2", "3"], right=(1.0, 1.0, 0.0)), [0.5, 0.5, -1])
    out = labelled(asked("1+2", ["4", "3", "5"], 1, right=(0.0, 1.0, 0.0)), [0, 0, 0])
    beside = labelled(asked("1+2", ["4", "4", "4"], 2, right=(0.0, 0.0, 0.0)), [-0.5, -0.5, -0.5])
    tables = [good, out, beside]
    assert r_zero.label_accuracy(tables) == 1.0
    assert r_zero.label_accuracy(tables, every=True) == pytest.approx(1 / 3)
    assert np.isnan(r_zero.label_accuracy([out, beside]))


@pytest.mark.parametrize("recipe, first", [(r_zero, "challenger"), (dr_zero, "proposer")])
def test_the_solver_of_a_frozen_arm_has_the_same_turns(recipe, first):
    """Every arm has two rounds within twenty steps; the frozen one learns nothing in the first turn of each."""
    found = recipe.RECIPE
    for arm in found.arms:
        phases = of_arm(found, arm, Path(), 0).phases
        assert [(phase.name, phase.steps, phase.policies) for phase in phases] == [
            (first, 5, ("p0",)), ("solver", 5, ("p1",)),
        ]  # fmt: skip
        rate = phases[0].learner.get("optimiser.schedule.learning_rate")
        assert rate == (0.0 if arm == f"frozen {first}" else None) and not phases[1].learner


def verified(text, rights, votes):
    """Answers that are right or not, three votes on each."""
    answers = [call("responder", kind="solver") for _ in rights]
    looks = [
        call("verifier", answer=vote, kind="judge", reads=(1 + i,))
        for i, three in enumerate(votes)
        for vote in three
    ]
    known = (None, *rights, *[None] * len(looks))
    return episode(call("questioner", text, answer=text), *answers, *looks, answers=known)


def test_votes_stand_in_where_the_rule_is_silent():
    """Of 12+3 the rule says all (an even sum of digits), of 12+4 nothing; yes, no, yes is a majority of yes."""
    mixed, noes = ("Correct", "Incorrect", "Correct"), ("Incorrect", None, "Incorrect")
    seen, silent = (verified(text, (1.0, 0.0), (noes, mixed)) for text in ("12+3", "12+4"))
    # A right answer by the rule, a wrong one by its votes; the mean of 1 and 1 is far from one half.
    far = np.exp(-0.25 / (2 / 36))
    assert spell.paid([seen])[0] == pytest.approx([far, 1, 1, 1, 0, 1, 1, 0, 1])
    assert spell.paid([silent])[0] == pytest.approx([1, 0, 1, 1, 0, 1, 1, 0, 1])
    assert spell.rule_alone([seen])[0][:3] == pytest.approx([1, 1, 0]) and spell.rule_alone([silent])[0][
        1:3
    ] == [0, 0]
    assert spell.votes_alone([seen])[0][1:3] == [0, 1] and spell.paid([episode(call("questioner"))]) == [
        [-1.0]
    ]
