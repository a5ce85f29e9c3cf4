"""The error for workflows, tasks and settings without a form in arrays; it names the hosted road."""

from marl_jax.errors import UserError


class NoArrayForm(UserError, ValueError):
    """A workflow, task, tokenizer or setting has no form in arrays; one line that names the hosted road."""

    def __init__(self, reason: str):
        super().__init__(f"{reason}: train it on the hosted road, --config.road=hosted")
        self.reason = reason
