"""What the compiled road refuses: whatever cannot be said in arrays, with the name of the road that takes it."""

from marl_jax.errors import UserError

__all__ = ["NoArrayForm"]


class NoArrayForm(UserError, ValueError):
    """A workflow, task, tokenizer or setting has no form in arrays; one line that names the hosted road."""

    def __init__(self, reason: str):
        super().__init__(f"{reason}: train it on the hosted road, --config.road=hosted")
        self.reason = reason
