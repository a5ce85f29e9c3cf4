"""What recipes pay and measure, on episodes made by hand."""

import dataclasses
import itertools

import numpy as np
import pytest
from by_hand import TASK, call, episode, kept, table_of
from scipy.optimize import minimize

from marl_jax.models.tokenizer import build_micro_tokenizer
from marl_jax.rollouts import Chat, write_episodes
from marl_jax.runs.collected import collected_path
from marl_jax.workflows import Completion, Fork, load_prompts
from recipes import (
    afm,
    at_grpo,
    b_star,
    comas,
    core_code,
    dr_mas,
    metaagent_x,
    optima,
    retroformer,
    severa,
    spo,
    unitymas_o,
)
from recipes import exit as exit_recipe
from recipes.recipe import Trained, accuracy, part, steps_of, tokens

# ---------------------------------------------------------------- dr_mas


def test_the_second_moment_of_a_role_is_what_the_formula_says():
    """Solver 1 1 0 0, verifier 1 1 1 0: of all, mean 5/8 and variance 15/64; factors 17/15 and 13/15."""
    worth = [(1, 1), (1, 1), (0, 1), (0, 0)]
    made = table_of(
        *(episode(call("solver"), call("verifier"), sample=i) for i in range(4)),
        reward=[value for pair in worth for value in pair],
    )
    for role, by_hand in (("solver", 17 / 15), ("verifier", 13 / 15)):
        assert dr_mas.formula(role, kept(made)) == pytest.approx(by_hand)
        # The same of the advantages, whose deviations are unbiased: 3/4 of one of four over 7/8 of one of eight.
        assert dr_mas.factor(role, kept(made)) == pytest.approx(by_hand * (7 / 8) / (3 / 4), rel=1e-4)
    assert np.isnan(dr_mas.formula("solver", kept(made.replace(reward=np.zeros(8)))))


def test_squared_norms_are_those_of_the_probe_where_nothing_moves():
    norm = "gradient/p0/norm/verifier"
    lines = [{"phase": "probe", norm: 1.0}, {"phase": "probe", norm: 3.0}, {"phase": "train", norm: 9.0}]
    run = Trained(table_of(episode(call("verifier"))), lines=lines)
    assert dr_mas.squared("verifier", run) == (1 + 9) / 2 and dr_mas.squared("solver", run) == 0.0


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
    assert metaagent_x.calls_at(1, trained) == 1 and metaagent_x.calls_at(3, trained) == 3.5
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


def test_an_execution_pays_for_its_calls_and_a_design_that_cannot_be_read_for_more_than_it_may_have():
    three = episode(*[call("executor")] * 4, outcome=1.0)
    unread = episode(call("designer"), outcome=0.0)
    assert metaagent_x.worth([three, unread]) == pytest.approx([1 - 3 * 0.02, -9 * 0.02])
    longest = episode(call("designer", answer="solve"), *[call("executor")] * metaagent_x.MOST, outcome=0.0)
    assert metaagent_x.worth([unread])[0] < metaagent_x.worth([longest])[0]


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


def test_what_the_base_pays_is_told_by_whether_the_answer_is_right():
    """Right answers earn 1 and 1/2, a wrong one 0."""
    made = [discussion("3"), discussion("2"), discussion("1")]
    rated = [dataclasses.replace(one, sample=i) for i, one in enumerate(made)]
    table = table_of(*rated, grades=[1, np.nan, np.nan, 1, np.nan, np.nan, 0, np.nan, np.nan])
    run = Trained(table, base=table)
    assert comas.base_pays(True, run) == 0.75 and comas.base_pays(False, run) == 0.0
    assert np.isnan(comas.base_pays(True, Trained(table)))


def test_early_and_late_rewards_are_those_of_the_first_and_the_last_quarter():
    lines = [{"role/solver/reward": value} for value in (0, 0.2, 0, None, 0, 0, 0, 0.5, 0.7)]
    run = Trained(table_of(episode(call("solver"))), lines=lines)
    assert part("role/solver/reward")(run) == pytest.approx(0.6)
    assert part("role/solver/reward", late=False)(run) == pytest.approx(0.1)
    assert np.isnan(part("role/evaluator/reward")(run))


# ---------------------------------------------------------------- optima


def test_what_was_collected_after_the_step_that_is_compared_is_left_out(tmp_path):
    """Steps 2, 3 and 5 were kept, and step 4 is compared; of the phase that keeps there were two steps."""
    for step in (2, 3, 5):
        write_episodes(collected_path(tmp_path, step), table_of(episode(call("solver", f"step {step}"))))
    phases = ("look", "keep", "keep", "look")
    lines = [{"step": i, "phase": phase} for i, phase in enumerate(phases, 1)]
    trained = Trained(table_of(episode(call("solver"))), lines=lines, folder=tmp_path)
    assert [table.text for table in trained.collected()] == [("step 2",), ("step 3",)]
    assert steps_of("keep")(trained) == 2 and steps_of("none")(trained) == 0


def test_the_price_is_on_the_share_of_the_longest_conversation():
    talks = [episode(call("teller", tokens=n), call("listener", tokens=10), outcome=1.0) for n in (10, 30)]
    assert optima.brief(talks) == [1 - 0.5 * 20 / 40, 0.5] and optima.correct(talks) == [1.0, 1.0]


def test_messages_the_base_knows_are_not_strange():
    said = ["37", "the first number that i have is 37", "3737373", "thfirst 7", ""]
    made = table_of(*(episode(call("teller", text), sample=i) for i, text in enumerate(said)))
    assert optima.strange(Trained(made)) == pytest.approx(2 / 5)
    assert optima.message_tokens(Trained(made)) == 3


# ---------------------------------------------------------------- b_star


def answers_at(*problems):
    """{role: (text, grade) of its answers}, problem by problem; scores are the grade and 0.1."""
    made, graded = [], []
    for number, problem in enumerate(problems):
        some = [(role, i, *said) for role, answers in problem.items() for i, said in enumerate(answers)]
        calls = [call(role, text, kind="solver", slot=i) for role, i, text, _ in some]
        made.append(episode(*calls, task=dataclasses.replace(TASK, id=f"t{number}")))
        graded += [grade for *_, grade in some]
    return table_of(*made, grades=graded, reward=np.array(graded) + 0.1)


def test_the_balance_is_share_of_right_times_enough_of_them():
    """Of 4 different ones, 3 are right: 3/4 x 3/4; none in the second problem."""
    rights, wrong = [("a", 1), ("b", 1), ("c", 1), ("c", 1)], [("x", 0)] * 4
    one = answers_at({"warm": rights + wrong})
    every = b_star.different(one, np.ones(8, bool))
    assert every.tolist() == [True, True, True, False, True, False, False, False]
    assert b_star.balance(one, every) == 9 / 16
    assert b_star.balance(one, every & (one.grade > 0)) == 3 / 4  # what is wrong is not chosen
    two = answers_at({"warm": rights + wrong}, {"warm": wrong})
    assert b_star.balance(two, b_star.different(two, two.grade > 0)) == 3 / 8
    assert b_star.balance(two, np.zeros(12, bool)) == 0.0


def test_what_the_best_setting_chooses_is_learned_once_and_nothing_else():
    """Different right ones: of the first problem cool 1, warm 4, hot 3, of the second 1, 2 and 2."""
    some = lambda texts, wrong: [*((text, 1) for text in texts), *[("x", 0)] * wrong]
    table = answers_at(
        {"cool": some("aaaa", 4), "warm": some("abcda", 3), "hot": some("abc", 5)},
        {"cool": some("aaaa", 4), "warm": some("ab", 6), "hot": some("ab", 6)},
    )
    learned = np.flatnonzero(b_star.balanced(table)["weight"])
    assert table.having(role="warm")[learned].all() and table.slot[learned].tolist() == [0, 1, 2, 3, 0, 1]
    assert not b_star.balanced(answers_at({"cool": [("x", 0)] * 8}))["weight"].any()


def test_a_fixed_setting_learns_no_more_than_the_best_one_may_choose():
    """Of 24 right answers the first eight, of which one is said twice."""
    table = answers_at({"warm": [(text, 1) for text in "abcdefga" + "ijklmnopqrstuvwx"]})
    assert np.flatnonzero(b_star.first_right(table)["weight"]).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert not b_star.first_right(answers_at({"warm": [("x", 0)] * 8}))["weight"].any()


def test_a_score_is_the_grade_and_a_fifth_of_the_confidence():
    """Mean log-prob ln(1/2) over two tokens: 1 + 1/10 where it is right, 1/10 where it is not."""
    made = [dataclasses.replace(call("warm"), logprobs=(np.log(1 / 4), 0.0))] * 2
    assert b_star.scored([episode(*made, answers=(1.0, 0.0))]) == [pytest.approx([1.1, 0.1])]


def test_passes_and_different_right_answers_are_counted_by_episode():
    """Right are a, b and b of four, then none; the same text in another episode is counted there."""
    calls = lambda texts: [call("warm", text, kind="solver", slot=i) for i, text in enumerate(texts)]
    made = table_of(
        episode(*calls("abbc")), episode(*calls("aaaa"), sample=1), grades=[1, 1, 1, 0, 0, 0, 0, 0]
    )
    assert b_star.pass_at_8(Trained(made)) == [1, 0] and b_star.different_right(Trained(made)) == [1 / 2, 0]
    again = table_of(episode(*calls("ab")), episode(*calls("ab"), sample=1), grades=[1, 1, 1, 0])
    assert b_star.different_right(Trained(again, samples=2)) == [3 / 4]


# ---------------------------------------------------------------- exit, afm

FIX = [{"role": "user", "content": "fix"}]


def test_a_history_is_a_problem_of_its_own():
    start = [{"role": "user", "content": "1+1=?"}]
    one, same, other = (exit_recipe.longer(TASK, start, said, FIX) for said in ("3", "3", "4"))
    assert one == same and one.id != other.id and one.gold == "2"
    assert [m["role"] for m in one.meta["history"]] == ["user", "assistant", "user"]
    two = exit_recipe.longer(one, one.meta["history"], "5", FIX)
    assert len(two.meta["history"]) == 5 and two.meta["history"][:3] == one.meta["history"]
    assert [exit_recipe.answers_in(task) for task in (TASK, one, two)] == [0, 1, 2]


def behind(*said):
    """The history of these answers."""
    task, messages = TASK, [{"role": "user", "content": "1+1=?"}]
    for one in said:
        task = exit_recipe.longer(task, messages, one, FIX)
        messages = task.meta["history"]
    return task


def asked_on(task, **settings):
    """(answers in its history, its prompt) of each call of a step, and the forks; what is said is the call's number."""
    steps, asked, forks, sent = (
        exit_recipe.improved(task, load_prompts("math", "micro"), **settings),
        [],
        [],
        None,
    )
    while True:
        try:
            item = steps.send(sent)
        except StopIteration:
            return asked, forks
        if isinstance(item, Fork):
            forks.append(item.ways)
            sent = 0
        else:
            shown = [message["content"] for message in item.messages]
            asked.append((exit_recipe.answers_in(item.about or task), shown))
            sent = Completion(str(len(asked)), (1,), (0.0,), "stop", None, len(asked) - 1)


def test_a_step_on_a_history_makes_a_longer_one_until_it_is_full():
    """Of four answers at most: behind two a third and a fourth, behind three the fourth alone."""
    assert asked_on(TASK) == ([(0, ["1+1=?"]), (1, ["1+1=?", "1", "fix"])], [4])
    said = ["1+1=?", "a", "fix", "b", "fix"]
    assert asked_on(behind("a", "b")) == ([(2, said), (3, [*said, "1", "fix"])], [4])
    assert asked_on(behind("a", "b", "c")) == ([(3, [*said, "c", "fix"])], [])
    assert asked_on(behind("a"), most=2) == ([(1, said[:3])], [])  # without growth
    asked, forks = asked_on(TASK, depth=4, revisions=1)
    assert [answers for answers, _ in asked] == [0, 1, 2, 3] and not forks


def test_four_answers_are_no_longer_than_the_rows_of_the_base():
    """The longest question, three answers of all their tokens with requests, and a fourth."""
    chat = Chat(build_micro_tokenizer())
    question = [{"role": "user", "content": "99+99=?"}]
    said = [{"role": "assistant", "content": "1" * exit_recipe.LONGEST}, *FIX]
    prompt = chat.start([*question, *said * (exit_recipe.MOST - 1)])
    assert len(prompt) + exit_recipe.LONGEST <= 256


def test_answers_are_counted_turn_by_turn():
    """Of two problems: right at first, in the end, or never."""
    talk = lambda sample: episode(*(call("generator", turn=i) for i in range(4)), sample=sample)
    run = Trained(table_of(talk(0), talk(1), grades=[1, 0, 0, 1, 1, 0, 0, 0]))
    assert [exit_recipe.graded(turn)(run) for turn in (0, 1, 3)] == [[1, 1], [0, 0], [1, 0]]


def test_late_revisions_are_those_behind_two_answers():
    """Of four calls, about a problem and histories of one, two and three answers, two are late."""
    tasks = (TASK, behind("a"), behind("a", "b"), behind("a", "b", "c"))
    made = table_of(*(episode(call("generator"), task=task) for task in tasks))
    assert exit_recipe.late_share(kept(made)) == 1 / 2 and np.isnan(exit_recipe.late_share(Trained(made)))


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
    assert retroformer.trial(0, Trained(worse)) == retroformer.trial(1, Trained(worse)) == 2 / 3
    right = episode(call("actor", kind="solver"), outcome=1.0, answers=(1.0,))
    assert retroformer.change([right]) == [0]  # nobody has reflected
    good = table_of(right, grades=[1.0])
    assert retroformer.mended_by_base(Trained(good, base=worse)) == 2 / 3
    assert np.isnan(retroformer.trial(1, Trained(good))) and np.isnan(
        retroformer.mended_by_base(Trained(good))
    )


def test_only_a_trial_that_fails_is_reflected_on():
    flow = retroformer.trials(TASK, load_prompts("math", "micro"))
    assert next(flow).role == "actor"
    with pytest.raises(StopIteration) as ended:
        flow.send(Completion("\\boxed{2}", (1,), (0.0,), "stop", "2", 0))
    assert ended.value.value.answer == "2"
    flow = retroformer.trials(TASK, load_prompts("math", "micro"))
    next(flow)
    assert flow.send(Completion("\\boxed{3}", (1,), (0.0,), "stop", "3", 0)) == Fork(4)
    assert flow.send(0).role == "reflector"


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
    best, *equal = spo.bt_cyclic([right, *wrong])
    assert best > 1 and np.ptp(equal) < 1e-9
    assert spo.prefers(wrong[1], wrong[0], cyclic=True) and not spo.prefers(wrong[0], wrong[1], cyclic=True)
    turned = [spo.prefers(said("2", 1.0, i), said("3", 0.0, 1000 + i), noise=0.3) for i in range(1000)]
    assert 0.65 < np.mean(turned) < 0.75
    for i in range(50):  # a comparison that is turned over is so from both sides
        one, other = said("2", 1.0, i), said("3", 0.0, 1000 + i)
        assert spo.prefers(one, other, noise=0.3) != spo.prefers(other, one, noise=0.3)


def test_scores_of_a_bradley_terry_model_are_the_likeliest():
    """Of two answers, one better: s = -s' with 1 - sigmoid(2 s) = PRIOR s; of random preferences by a search."""
    one, other = spo.strengths([1.0, 0.0])
    assert one == -other and 1 / (1 + np.exp(2 * one)) == pytest.approx(spo.PRIOR * one)
    assert spo.strengths([0.5]) == [0.0]
    rng = np.random.default_rng(0)
    for _ in range(20):
        won = np.triu(rng.choice((0.0, 0.5, 1.0), (8, 8)), 1)
        won += np.tril(1 - won.T, -1)

        def unlikely(scores, won=won):
            gaps = scores[:, None] - scores
            return np.sum(won * np.logaddexp(0, -gaps)) + spo.PRIOR / 2 * np.sum(scores**2)

        shares = won.sum(1) / 7
        found = np.array(spo.strengths(shares.tolist()))
        np.testing.assert_allclose(found, minimize(unlikely, np.zeros(8), tol=1e-9).x, atol=1e-4)
        for i, j in itertools.permutations(range(8), 2):  # their order is that of the shares
            assert (found[i] - found[j] > 1e-9) == (shares[i] - shares[j] > 1e-9)


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


def test_calls_that_were_rejected_weigh_nothing_where_they_are_left_out():
    broken, good = call("generator", kind="solver"), call("generator", "\\boxed{2}", "2", kind="solver")
    assert severa.accepted(table_of(episode(broken, good)))["weight"].tolist() == [0, 1]


def test_accuracy_and_tokens_are_means_over_episodes():
    """Two problems of two episodes: right, wrong; right, right. Calls of 3, 3, 3 and 3 + 9 tokens."""
    made = [episode(call("generator"), outcome=o, sample=i) for i, o in enumerate((1, 0, 1))]
    table = table_of(*made, episode(call("generator"), call("generator", tokens=9), outcome=1.0, sample=3))
    assert accuracy(Trained(table, samples=2)) == [0.5, 1.0] and tokens(Trained(table)) == 21 / 4


def test_the_accuracy_of_a_recipe_is_by_its_metric_where_it_has_one():
    made = table_of(*(episode(call("solver"), sample=i) for i in range(4)))
    worth = [dataclasses.replace(one, outcome=x) for one, x in zip(made.bare_episodes, (0.0, 0.25, 0.5, 1.0))]
    made = made.replace(bare_episodes=tuple(worth))
    assert accuracy(Trained(made, 2)) == [0.0, 1.0]  # from a half on right
    assert accuracy(Trained(made, 2, by_metric=True)) == [0.125, 0.75]
