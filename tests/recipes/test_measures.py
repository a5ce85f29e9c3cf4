"""What recipes pay and measure, on episodes made by hand."""

import dataclasses
import itertools

import numpy as np
import pytest

from marl_jax.episodes import CallRecord, Episode
from marl_jax.rewards import extract_boxed
from marl_jax.table import Table
from marl_jax.task import Task
from marl_jax.tasks import micro
from marl_jax.workflows import Completion, load_prompts
from recipes import (
    absolute_zero,
    afm,
    at_grpo,
    comas,
    core_code,
    dr_mas,
    metaagent_x,
    optima,
    r_zero,
    retroformer,
    severa,
    spell,
    spo,
    unitymas_o,
    untrained,
)
from recipes import exit as exit_recipe
from recipes.recipe import Trained, part

TASK = Task("micro_math/1+1=?", "math", "1+1=?", gold="2", level=1, meta={"kind": "add", "terms": [1, 1]})


def call(role, text="", answer=None, *, kind="team", tokens=3, **facts):
    said = {"tokens": (1,) * tokens, "logprobs": (0.0,) * tokens, "finish_reason": "stop"}
    where = {"policy": "p0", "slot": 0, "turn": 0, "prompt_tokens": (1,), **facts}
    return CallRecord(role=role, text=text, answer=answer, kind=kind, **said, **where)


def episode(*calls, outcome=0.0, answers=None, sample=0, answer=None, task=TASK):
    answers = answers or tuple(None for _ in calls)
    return Episode(task, sample, "made", calls, answer, outcome=outcome, answers=tuple(answers))


def kept(*tables):
    """A run whose phases have collected these."""

    class Kept(Trained):
        def collected(self):
            return list(tables)

    return Kept(tables[0])


def table_of(*episodes, grades=None, reward=None):
    """A graded table of them; `grades` and `reward` call by call."""
    made = Table.of(list(episodes))
    outcome = np.array([one.outcome for one in episodes], float)[made.episode]
    grade = np.array(grades if grades is not None else [np.nan] * len(made), float)
    return made.replace(
        outcome=outcome, grade=grade, reward=None if reward is None else np.array(reward, float)
    )


# ---------------------------------------------------------------- dr_mas


def test_the_second_moment_of_a_role_is_what_the_formula_says():
    """Solver 1 1 0 0, verifier 1 1 1 0: of all, mean 5/8 and variance 15/64; factors 17/15 and 13/15."""
    worth = [(1, 1), (1, 1), (0, 1), (0, 0)]
    made = table_of(
        *(episode(call("solver"), call("verifier"), sample=i) for i in range(4)),
        reward=[value for pair in worth for value in pair],
    )
    for role, by_hand in (("solver", 17 / 15), ("verifier", 13 / 15)):
        assert dr_mas.formula(role)(kept(made)) == pytest.approx(by_hand)
        # The same of the advantages, whose deviations are unbiased: 3/4 of one of four over 7/8 of one of eight.
        assert dr_mas.factor(role)(kept(made)) == pytest.approx(by_hand * (7 / 8) / (3 / 4), rel=1e-4)
    assert np.isnan(dr_mas.formula("solver")(kept(made.replace(reward=np.zeros(8)))))


def test_squared_norms_are_those_of_the_probe_where_nothing_moves():
    norm = "gradient/p0/norm/verifier"
    lines = [{"phase": "probe", norm: 1.0}, {"phase": "probe", norm: 3.0}, {"phase": "train", norm: 9.0}]
    run = Trained(table_of(episode(call("verifier"))), lines=lines)
    assert dr_mas.squared("verifier")(run) == (1 + 9) / 2 and dr_mas.squared("solver")(run) == 0.0


def test_spikes_are_told_from_a_steady_run():
    lines = [{"phase": "probe", "policy/p0/grad_norm": 99.0}]
    lines += [{"phase": "train", "policy/p0/grad_norm": norm} for norm in (1.0, 1.0, 4.0)]
    empty = table_of(episode(call("solver")))
    assert dr_mas.spikes(Trained(empty, lines=lines)) == 4.0 and np.isnan(dr_mas.spikes(Trained(empty)))


# ---------------------------------------------------------------- at_grpo, core_code


def test_verdicts_are_judged_by_the_draft_they_read():
    solver = {"kind": "solver"}
    right = episode(
        call("reasoner", answer="2", **solver), call("critic", answer="Correct", kind="judge", reads=(0,))
    )
    wrong = episode(
        call("reasoner", answer="3", **solver),
        call("critic", answer="Correct", kind="judge", reads=(0,)),
        sample=1,
    )
    made = table_of(right, wrong, grades=[1, np.nan, 0, np.nan])
    assert at_grpo.judged(Trained(made)) == 0.5


def test_a_plan_is_obeyed_where_its_steps_are_the_programs():
    plan = call("planner", "x+7, x*3")
    made = table_of(
        episode(plan, call("coder", answer="def f(x):\n x=x+7\n return x*3", kind="solver")),
        episode(plan, call("coder", answer="def f(x):\n return x*3", kind="solver"), sample=1),
    )
    assert core_code.obeyed(Trained(made)) == 0.5


# ---------------------------------------------------------------- metaagent_x


def test_designs_are_counted_by_level_and_the_oracle_takes_the_best_of_each():
    def designed(text, level, sample):
        task = dataclasses.replace(TASK, id=f"t{level}", level=level)
        return episode(call("designer", answer=text), sample=sample, task=task)

    made = table_of(
        designed("solve", 1, 0),
        designed("vote(3, solve)", 3, 1),
        designed("judge(3, solve)", 3, 2),
        designed(None, 3, 3),
    )
    trained = Trained(made)
    assert metaagent_x.calls_at(1)(trained) == 1 and metaagent_x.calls_at(3)(trained) == 3.5
    assert metaagent_x.unreadable(trained) == 0.25

    def played(*outcomes):
        """Two problems of level 1 and two of level 3, in turn."""
        tasks = [dataclasses.replace(TASK, id=f"t{i}", level=(1, 3)[i % 2]) for i in range(4)]
        return table_of(*(episode(call("executor"), outcome=o, task=t) for o, t in zip(outcomes, tasks)))

    # Level 1: its first problem chooses "solve", with 0.4 of the second; that one "vote", with 0.7 of the first.
    also = {"solve": played(0.9, 0.2, 0.4, 0.2), "vote(3, solve)": played(0.7, 0.6, 0.5, 0.6)}
    by_hand = (0.4 + 0.7 + 0.6 + 0.6) / 4
    assert metaagent_x.oracle(dataclasses.replace(trained, also=also)) == pytest.approx(by_hand)
    assert metaagent_x.value(Trained(played(1, 0, 1, 0))) == [1, 0, 1, 0]  # one call costs nothing


def test_an_execution_pays_for_its_calls_and_a_design_that_cannot_be_read_for_none():
    three = episode(*[call("executor")] * 4, outcome=1.0)
    unread = episode(call("designer"), outcome=0.0)
    assert metaagent_x.worth([three, unread]) == [pytest.approx(1 - 3 * 0.02), 0.0]


# ---------------------------------------------------------------- comas


def discussion(score, verdict="Incorrect"):
    calls = [
        call("solver"),
        call("evaluator", answer=verdict, reads=(0,)),
        call("scorer", answer=score, reads=(0, 1)),
    ]
    return episode(*calls)


@pytest.mark.parametrize(
    "score, paid", [("3", [1, 0, 0]), ("2", [0.5, 0.5, 0]), ("1", [0, 1, 0]), (None, [0, 0, -1])]
)
def test_solver_and_evaluator_are_paid_against_each_other(score, paid):
    """A judge that says nothing readable pays nobody, and is fined."""
    assert comas.verdicts([discussion(score)]) == [paid]


def test_without_a_scorer_the_verdict_is_the_score():
    calls = lambda answer: [call("solver"), call("evaluator", answer=answer, reads=(0,))]
    made = [episode(*calls(answer)) for answer in ("Correct", "Incorrect", None)]
    assert comas.verdicts(made) == [[1, 0], [0, 0], [0, -1]]


def test_early_and_late_rewards_are_those_of_the_first_and_the_last_quarter():
    lines = [{"role/solver/reward": value} for value in (0, 0.2, 0, None, 0, 0, 0, 0.5, 0.7)]
    run = Trained(table_of(episode(call("solver"))), lines=lines)
    assert part("role/solver/reward")(run) == pytest.approx(0.6)
    assert part("role/solver/reward", late=False)(run) == pytest.approx(0.1)
    assert np.isnan(part("role/evaluator/reward")(run))


# ---------------------------------------------------------------- optima


def test_the_price_is_on_the_share_of_the_longest_conversation():
    talks = [episode(call("teller", tokens=n), call("listener", tokens=10), outcome=1.0) for n in (10, 30)]
    assert optima.brief(talks) == [1 - 0.5 * 20 / 40, 0.5] and optima.correct(talks) == [1.0, 1.0]


def test_messages_the_base_knows_are_not_strange():
    said = ["37", "the first number that i have is 37", "3737373", "thfirst 7", ""]
    made = table_of(*(episode(call("teller", text), sample=i) for i, text in enumerate(said)))
    assert optima.strange(Trained(made)) == pytest.approx(2 / 5)
    assert optima.message_tokens(Trained(made)) == 3


# ---------------------------------------------------------------- absolute_zero, r_zero


def test_what_is_written_is_executed_and_its_answer_is_computed():
    asked = [absolute_zero.executed(kind, "12-4") for kind in ("deduction", "abduction", "induction")]
    if asked[0] is None:
        pytest.fail("12-4 is held out: choose another example")
    assert [(one.question, one.gold) for one in asked] == [
        ("12-4=?", "8"), ("12-x=8, x=?", "4"), ("5>1, 11>7, 12>?", "8"),
    ]  # fmt: skip
    for text in ("", "12", "12+", "123+4", "3-9", "12*4", "12-4=8", "__import__('os')"):
        assert absolute_zero.executed("deduction", text) is None
    assert len({one.id for one in asked}) == 3


def test_what_is_held_out_are_the_problems_of_val_and_test():
    for split, known in (("train", False), ("val", True), ("test", True)):
        for task in itertools.islice(micro.stream("micro_math", split, levels=(1,)), 20):
            sign = "+" if task.meta["kind"] == "add" else "-"
            assert absolute_zero.is_held_out(task.meta["terms"][0], sign, task.meta["terms"][1]) == known


def test_no_problem_of_the_test_split_can_be_proposed():
    refused = [
        f"{a}+{b}"
        for a in range(40)
        for b in range(40)
        if absolute_zero.executed("deduction", f"{a}+{b}") is None
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


def test_labels_are_measured_against_the_truth():
    good = asked("1+1", ["2", "2", "3"], right=(1.0, 1.0, 0.0))
    drifted = asked("1+2", ["4", "4", "3"], 1, right=(0.0, 0.0, 1.0))
    both = [table_of(one, grades=[np.nan, *one.answers[1:]]) for one in (good, drifted)]
    assert r_zero.label_accuracy(both) == 0.5
    assert r_zero.early(kept(*both)) == 1.0 and r_zero.late(kept(*both)) == 0.0


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


def test_a_history_is_a_problem_of_its_own():
    start = [{"role": "user", "content": "1+1=?"}]
    one, same, other = (exit_recipe.longer(TASK, start, said) for said in ("3", "3", "4"))
    assert one == same and one.id != other.id and one.gold == "2"
    assert [m["role"] for m in one.meta["history"]] == ["user", "assistant", "user"]
    twice = exit_recipe.longer(one, one.meta["history"], "5").meta["history"]
    assert len(twice) == 5 and twice[:3] == one.meta["history"]
    deep = table_of(episode(call("generator"), outcome=1.0), episode(call("generator"), sample=1))
    assert exit_recipe.at_depth(8)(Trained(deep, also={"depth 8": deep})) == 0.5
    assert np.isnan(exit_recipe.at_depth(1)(Trained(deep, also={"depth 8": deep})))


def test_a_policy_that_was_told_a_teams_words_begins_as_one():
    said = ["<generator>7</generator>", "7+8=15"]
    assert (
        afm.tagged(Trained(table_of(*(episode(call("generator", t), sample=i) for i, t in enumerate(said)))))
        == 0.5
    )


# ---------------------------------------------------------------- retroformer, unitymas_o, spo, severa


def test_a_reflection_earns_the_change_that_it_makes():
    trials = [call("actor", kind="solver"), call("reflector"), call("actor", kind="solver", turn=1)]
    made = [
        episode(*trials, outcome=o, answers=(f, None, o), sample=i)
        for i, (f, o) in enumerate([(0, 1), (1, 1), (1, 0)])
    ]
    assert retroformer.change(made) == [1, 0, -1]
    worse = table_of(*made, grades=[0, np.nan, 1, 1, np.nan, 1, 1, np.nan, 0])
    assert retroformer.trial(0)(Trained(worse)) == retroformer.trial(1)(Trained(worse)) == 2 / 3


def test_turns_earn_what_they_change_and_later_turns_are_told_apart():
    calls = [call("generator", kind="solver", turn=i) for i in range(3)]
    made = episode(*calls, answers=(0.0, 1.0, 0.0))
    assert unitymas_o.by_turn([made]) == [[0.0, 1.0, -1.0]]
    assert unitymas_o.later(Trained(table_of(made, grades=made.answers))) == 0.5


def test_preferences_are_transitive_noisy_or_cyclic():
    def said(answer, outcome, sample):
        return episode(call("generator", answer), outcome=outcome, answer=answer, sample=sample)

    right, *wrong = [said("2", 1.0, 0), said("3", 0.0, 1), said("4", 0.0, 2), said("5", 0.0, 3)]
    assert spo.sure([right, *wrong]) == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3])
    assert spo.cyclic([right, *wrong]) == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3])  # a cycle has no best one
    assert spo.prefers(wrong[1], wrong[0], cyclic=True) and not spo.prefers(wrong[0], wrong[1], cyclic=True)
    turned = [spo.prefers(said("2", 1.0, i), said("3", 0.0, 1000 + i), noise=0.3) for i in range(1000)]
    assert 0.65 < np.mean(turned) < 0.75
    for i in range(50):  # a comparison that is turned over is so from both sides
        one, other = said("2", 1.0, i), said("3", 0.0, 1000 + i)
        assert spo.prefers(one, other, noise=0.3) != spo.prefers(other, one, noise=0.3)


def test_the_contract_holds_whatever_is_said():
    said = ("\\boxed{-12}", "\\boxed{12345}", "\\boxed{x}", "12", "\\boxed{}", "\\boxed{--1}", "\\boxed{²}")
    assert [severa.holds(text) for text in said] == ["-12", *[None] * 6]
    broken, good = call("generator", kind="solver"), call("generator", "\\boxed{2}", "2", kind="solver")
    made = [
        episode(broken, good, outcome=1.0, answer="2"),
        episode(broken, broken, broken, answer="0", sample=1),
        episode(broken, answer=None, sample=2),
    ]
    assert severa.penal(made) == [[-1.0, 1.0], [-1.0] * 3, [-1.0]]
    trained = Trained(table_of(*made))
    assert severa.violations(trained) == pytest.approx(1 / 3) and severa.fallbacks(trained) == pytest.approx(
        2 / 3
    )


def drive(flow, said):
    """The roles that are asked, and what is returned, where the calls say this in turn; read by their box."""
    script, asked, texts, reply = flow(TASK, load_prompts("math", "micro")), [], iter(said), None
    try:
        while True:
            items = script.send(reply)
            batch = items if isinstance(items, list) else [items]
            done = []
            for one in batch:
                text = next(texts)
                answer = one.read(text) if one.read else extract_boxed(text)
                done.append(Completion(text, (1,), (0.0,), "stop", answer, len(asked)))
                asked.append((one.role, one.slot))
            reply = done if isinstance(items, list) else done[0]
    except StopIteration as stop:
        return asked, stop.value.answer


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
