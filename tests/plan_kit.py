"""Plans of runs whose policies all have one model."""

from marl_jax.planning import plan
from marl_jax.policies import policy_names
from marl_jax.sampling.shapes import EngineSettings


def of_all(config, given):
    """{policy: the same of each}."""
    return dict.fromkeys(policy_names(config.policies.map), given)


def plan_of(config, model, *args) -> plan.Plan:
    return plan.make_plan(config, of_all(config, model), *args)


def fitting(config, model, device, engine: EngineSettings | None = None) -> plan.Plan:
    """The plan of a run that fits; with these shapes of all its engines, if they are settled."""
    settled = {spec.base: engine for spec in config.policies.specs.values()} if engine else None
    return plan.check_fits(config, of_all(config, model), device, settled)


def engine_of(made: plan.Plan) -> EngineSettings:
    (engine,) = made.each_shape
    return engine
