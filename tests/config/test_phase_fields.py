"""A list of phases says which one a step is in; what cannot be is refused with the way out."""

import dataclasses
import json

import pytest
from test_config import VOTING, refused

from marl_jax.config.phase_fields import Phase, learner_of, phase_at
from marl_jax.config.run_config import RunConfig, load_config
from marl_jax.learning import LearnerConfig, LossConfig

TWO = (Phase(3, "a"), Phase(2, "b"))


def test_the_list_begins_again_when_it_is_through():
    found = [(at.number, at.phase.name, at.first) for at in (phase_at(TWO, step) for step in range(12))]
    first_round = [(0, "a", 0)] * 3 + [(1, "b", 3)] * 2
    second_round = [(2, "a", 5)] * 3 + [(3, "b", 8)] * 2
    assert found == first_round + second_round + [(4, "a", 10)] * 2


def phased(*phases):
    return ("phases", json.dumps(phases))


def test_phases_are_read_from_a_command_line_and_come_back_from_json():
    asked = [
        {"steps": 20, "roles": ["generator"], "collect": True},
        {"steps": 10, "objective": "dpo", "source": "collected", "learner": {"preference.beta": 0.2}},
    ]
    config = load_config(VOTING, [phased(*asked)])
    first, second = config.phases
    assert first == Phase(20, roles=("generator",), collect=True)
    assert (second.objective, second.learner) == ("dpo", {"preference.beta": 0.2})
    assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert load_config(VOTING).phases == ()


def test_a_phase_changes_the_learner_by_path():
    config = LearnerConfig(LossConfig(clip_low=0.1))
    assert learner_of(config, Phase(1)) is config
    changes = {"optimiser.schedule.learning_rate": 1e-3, "epochs": 2, "preference.above": 0.5}
    changed = learner_of(config, Phase(1, objective="kto", learner=changes))
    assert changed.loss == LossConfig("kto", clip_low=0.1) and changed.epochs == 2
    assert changed.optimiser.schedule.learning_rate == 1e-3 and changed.preference.above == 0.5
    with pytest.raises(ValueError, match=r"epochs is .*; it must be an integer"):
        learner_of(config, Phase(1, learner={"epochs": {2}}))


def test_the_rate_of_a_phase_is_that_of_policies_with_a_rate_of_their_own():
    config = LearnerConfig(learning_rates={"p1": 0.02})
    rate = {"optimiser.schedule.learning_rate": 0.0}
    assert learner_of(config, Phase(1, learner=rate)).learning_rates == {}
    both = learner_of(config, Phase(1, learner=rate | {"learning_rates": {"p1": 0.1}}))
    assert both.learning_rates == {"p1": 0.1}
    for nested in (
        {"optimiser.schedule": {"learning_rate": 0.25}},
        {"optimiser": {"schedule": {"learning_rate": 0.25}}},
    ):
        changed = learner_of(config, Phase(1, learner=nested))
        assert changed.learning_rates == {} and changed.optimiser.schedule.learning_rate == 0.25
    two = LearnerConfig(learning_rates={"p1": 0.02, "p2": 0.03})
    assert learner_of(two, Phase(1, learner=rate | {"learning_rates.p1": 0.5})).learning_rates == {"p1": 0.5}
    with pytest.raises(ValueError, match=r"learner\.optimiser\.kind is fixed for a run"):
        learner_of(config, Phase(1, learner={"optimiser": {"kind": "sgd"}}))
    assert learner_of(config, Phase(1, learner={"epochs": 2})).learning_rates == {"p1": 0.02}


def test_a_role_that_no_phase_trains_may_answer_greedily():
    greedy = ("role_sampling.aggregator.temperature", "0")
    assert load_config(VOTING, [greedy, phased({"steps": 5, "roles": ["generator"]})]).phases
    assert "aggregator' samples at temperature 0" in refused(greedy, phased({"steps": 5}))[0]
    lifted = {"steps": 5, "learner": {"interventions.freeze": []}}
    frozen = ("learner.interventions.freeze", "aggregator")
    assert "aggregator' samples at temperature 0" in refused(greedy, frozen, phased(lifted))[0]
    assert load_config(
        VOTING, [greedy, phased({"steps": 5, "learner": {"interventions.freeze": ["aggregator"]}})]
    )


def test_who_trains():
    owners = {"generator/0": "p0", "generator/1": "p1", "judge": "p0"}
    whole, one = Phase(1), Phase(1, roles=("generator/1",))
    assert whole.trained_policies(owners, ()) == ("p0", "p1") and whole.trains("judge", 0, "p0")
    assert one.trained_policies(owners, ()) == ("p1",)
    assert one.trains("generator", 1, "p1") and not one.trains("generator", 0, "p0")
    assert Phase(1, policies=("p0",)).trained_policies(owners, ("judge",)) == ("p0",)
    assert Phase(1, roles=("judge",)).trained_policies(owners, ("judge",)) == ()
    # A single slot of a role that the map has as one.
    assert Phase(1, roles=("judge/2",)).trained_policies({"judge": "p0"}, ()) == ("p0",)
    # One that has a policy of its own beside the role's.
    assert Phase(1, roles=("judge/2",)).trained_policies({"judge": "p0", "judge/2": "p1"}, ()) == ("p1",)


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        ({"steps": 5, "rols": []}, "without the unknown 'rols': did you mean 'roles'?"),
        ({"steps": 5, "name": "1"}, "name is '1'; phases without a name have numbers"),
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"steps": 5, "start": "first"}, "start is 'first'; it must be last or base, or RUN@STEP"),
        ({"steps": 5, "reference": "own"}, "reference is 'own'; it must be base or start, or RUN@STEP"),
        ({"steps": 5, "roles": ["generater"]}, "did you mean 'generator'?"),
        ({"steps": 5, "roles": ["generator/x"]}, "names 'generator/x', which is no role of the workflow"),
        ({"steps": 5, "roles": ["generator/01"]}, "names 'generator/01', which is no role of the workflow"),
        ({"steps": 5, "policies": ["p7"]}, "names 'p7', which is no policy of policies.map"),
        ({"steps": 5, "copies": {"p0": "p7"}}, "names 'p7', which is no policy"),
        ({"steps": 5, "objective": "dop"}, "loss kind 'dop' is unknown"),
        ({"steps": 5, "objective": "kto"}, "'kto' needs preference.above"),
        ({"steps": 5, "learner": {"optimiser.kind": "sgd"}}, "learner.optimiser.kind is fixed for a run"),
        ({"steps": 5, "learner": {"epoch": 2}}, "did you mean"),
        ({"steps": 5, "learner": {"interventions.freeze": ["generator", "aggregator"]}}, "trains nothing"),
        (
            {
                "steps": 5,
                "roles": ["generator"],
                "learner": {"interventions.alternate": ["generator", "aggregator"]},
            },
            "which both decide what trains",
        ),
        ({"name": "x"}, "it must be Phase(...) with 'steps'"),
        (
            {"steps": 5, "learner": {"interventions.kl_coef": {"agregator": 0.1}}},
            "did you mean 'aggregator'?",
        ),
        ({"steps": 5, "learner": {"learning_rates": {"p7": 0.1}}}, "names 'p7', which is no policy"),
        ({"steps": 5, "source": "collected"}, "no phase before it collects: set collect"),
        ({"steps": 5, "flatten": "generator"}, "flatten is for calls from a source"),
        (
            {"steps": 5, "source": "calls", "flatten": "generator"},
            "needs the sampler's log-probs: set objective to one of sft",
        ),
        ({"steps": 5, "roles": ["generator"], "policies": ["p1"]}, "trains nothing"),
        (
            {"steps": 5, "roles": ["generator/3"]},
            "phases[0].roles names 'generator/3', but the slots of 'generator' are 0 to 2",
        ),
        ({"steps": 5, "objective": "dpo", "learner": {"loss.kind": "gspo"}}, "both name the loss"),
    ],
)
def test_a_phase_that_cannot_be_is_refused_with_the_way_out(phase, message):
    (line,) = refused(phased(phase))
    assert message in line


def test_what_is_wrong_between_phases_is_told():
    never = refused(("steps", "5"), phased({"steps": 5}, {"steps": 2, "name": "late"}))
    assert never == ["phases[1] (late) is never reached: it would begin after step 5, and steps is 5"]
    twice = refused(phased({"steps": 5, "name": "a"}, {"steps": 2, "name": "a"}))
    assert twice == ["two phases are called 'a': give them different names"]
    (both,) = refused(
        ("learner.interventions.alternate", "generator,aggregator"),
        phased({"steps": 5, "roles": ["generator"]}),
    )
    assert "which both decide what trains" in both
    (held,) = refused(
        ("learner.interventions.freeze", "generator"), phased({"steps": 5, "roles": ["generator"]})
    )
    assert "trains nothing" in held


def test_a_map_with_an_impossible_slot_is_refused_as_without_phases():
    wrong = ("policies.map", '{"generator/x": "p0", "aggregator": "p1"}')
    (line,) = refused(wrong, phased({"steps": 5, "roles": ["aggregator"]}))
    assert "policy map names 'generator/x', which is no role of the workflow" in line


def test_a_phase_of_frozen_roles_trains_nothing():
    lines = refused(("policies.frozen_roles", "aggregator"), phased({"steps": 5, "roles": ["aggregator"]}))
    assert lines == [
        "phases[0] trains nothing: name roles or policies that are not frozen, or leave the phase out"
    ]


def test_a_frozen_slot_that_never_answers_is_refused():
    lines = refused(("policies.frozen_roles", "generator/2,generator/3"))
    assert lines == ["policies.frozen_roles names 'generator/3', but the slots of 'generator' are 0 to 2"]


def test_a_text_that_is_no_list_is_refused():
    (line,) = refused(("phases", "sft"))
    assert "it must be a JSON list of objects with the fields steps, name, roles" in line
    assert dataclasses.fields(Phase)[0].name == "steps"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[{"steps": 5, "learner": {"epochs": 2}, "learner": {}}]', "'learner' appears twice"),
        ('[{"steps": 5,}]', "Expecting property name"),
    ],
)
def test_a_list_that_cannot_be_read_is_refused_with_the_reason(text, reason):
    (line,) = refused(("phases", text))
    assert f"it must be a JSON list that can be read: {reason}" in line


def test_a_frozen_role_takes_no_turn_of_a_phase():
    turns = {"steps": 5, "learner": {"interventions.alternate": ["generator", "aggregator"]}}
    (line,) = refused(("policies.frozen_roles", "aggregator"), phased(turns))
    assert (
        "phases[0]: learner.interventions.alternate names aggregator, frozen by policies.frozen_roles" in line
    )


def test_a_phase_may_lift_what_the_run_holds():
    frozen = ("learner.interventions.freeze", "generator")
    free = {"steps": 5, "roles": ["generator"], "learner": {"interventions.freeze": []}}
    assert load_config(VOTING, [frozen, phased(free)]).phases[0].roles == ("generator",)
    turns = ("learner.interventions.alternate", "generator,aggregator")
    alone = {"steps": 5, "roles": ["generator"], "learner": {"interventions.alternate": []}}
    assert load_config(VOTING, [turns, phased(alone)]).phases[0].roles == ("generator",)
