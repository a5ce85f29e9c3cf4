"""The roles whose prompts a micro base was trained on, from `recipe.json` beside its weights.

    {"words": {"math_micro/generator": digest of its prompt file, ...}}

A base without such a list (a published model) is assumed to understand any words.
"""

import hashlib
import itertools
from typing import Any

from marl_jax import user_cache
from marl_jax.config.run_fields import RunFields
from marl_jax.packaged import resolve_path
from marl_jax.pretraining.recipe import Recipe
from marl_jax.pretraining.transcripts import episodes, turns
from marl_jax.workflows import Prompts, load_prompts

RECIPE = "recipe.json"
EPISODES = 1000  # episodes that are looked at: many of every workflow and of both kinds of task


def digest(text: str) -> str:
    """The digest of a role's prompt file."""
    return hashlib.sha256(text.encode()).hexdigest()


def words_of(recipe: Recipe, tokenizer: Any) -> dict[str, str]:
    """The list for a recipe: the roles that have a history short enough to train on in its first episodes."""
    stream = episodes(tokenizer, seed=recipe.seed, skill=recipe.skill, levels=recipe.levels)
    found = set()
    for episode in itertools.islice(stream, EPISODES):
        for chain in turns(episode):
            if len(chain[0].prompt_tokens) + len(chain[0].tokens) <= recipe.length:
                found |= {(episode.task.family, call.role) for call in chain}
    return {
        f"{family}_micro/{role}": digest(load_prompts(family, "micro").files[role])
        for family, role in sorted(found)
    }


def untaught(config: RunFields, prompts: Prompts) -> list[str]:
    """The roles with a base that was never trained on their current prompts."""
    untaught = []
    for role in config.roles:
        policies = {name for key, name in config.policies.map.items() if key.split("/")[0] == role}
        known = [_known(config, policy) for policy in policies] if role in prompts.files else []
        if any(words is not None and digest(prompts.files[role]) not in words for words in known):
            untaught.append(role)
    return untaught


def untaught_warning(config: RunFields, prompts: Prompts) -> str:
    """One line about untaught roles; empty if there are none."""
    roles = untaught(config, prompts)
    if not roles:
        return ""
    return f"the base was never trained on the prompts of {', '.join(roles)}: their answers may mean nothing"


def _known(config: RunFields, policy: str) -> set[str] | None:
    base = config.policies.bases.get(policy, config.policies.base)
    words = user_cache.load(resolve_path(base) / RECIPE).get("words")
    return {*words.values()} if isinstance(words, dict) else None
