"""The learner's functions alone: advantages of two groups, and the clipped loss of their tokens.

python -m examples.losses
"""

import jax
import jax.numpy as jnp

from marl_jax.learning import group_advantages, policy_loss

rewards, groups = jnp.array([1.0, 0.0, 0.0, 1.0, 1.0, 1.0]), jnp.array([0, 0, 0, 1, 1, 1])
advantages = group_advantages(rewards, groups)
print("advantages", advantages)  # 0 in the second group, whose rewards are equal

logp, mask = jnp.full((6, 4), -1.0), jnp.ones((6, 4), bool)
loss = lambda logp: policy_loss(logp, jax.lax.stop_gradient(logp), advantages, mask).value
value, gradient = jax.value_and_grad(loss)(logp)
print("loss", value, "gradient by row", gradient.sum(axis=1))
