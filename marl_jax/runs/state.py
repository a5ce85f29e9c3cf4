"""The state of a run: everything that changes from step to step, as its newest checkpoint has it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from marl_jax.learning import LearnerState
from marl_jax.policies import Tree
from marl_jax.tasks import Position
from marl_jax.tasks.buffer import Entries, Entry


@dataclasses.dataclass(frozen=True)
class State:
    """All that changes from step to step; checkpoints contain all but `failure`, and old ones lack the learner."""

    step: int
    trees: dict[str, Tree]  # of the policies that learn
    learner: dict[str, LearnerState]
    position: Position  # in the stream of tasks
    accuracy: float | None = None  # of these policies, once they are evaluated
    best: dict[str, Any] | None = None  # step and accuracy of the best evaluation so far
    # Length and readability of every role's first completions.
    form: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    buffer: Entries = ()  # tasks that earlier calls were about, see `tasks.buffer`
    phase: int | None = None  # number of the last phase begun, counted over all rounds; see `phases`
    # Reference weights of the last phase with others than the base; None if no phase has others.
    reference: dict[str, Tree] | None = None
    failure: str = ""  # why the run ends after this step, although the state is good; not saved

    @property
    def updates(self) -> dict[str, int]:
        """Optimiser updates of every policy so far."""
        return {name: state.updates for name, state in self.learner.items()}

    @property
    def arrays(self) -> dict[str, Any]:
        """The trees of a checkpoint."""
        kept = {} if self.reference is None else {"reference": self.reference}
        return {"policies": self.trees, "learner": self.learner, **kept}

    @property
    def numbers(self) -> dict[str, Any]:
        """The rest of a checkpoint, as JSON."""
        rest = {
            name: getattr(self, name) for name in ("step", "updates", "accuracy", "best", "form", "phase")
        }
        buffer = {"buffer": [entry.to_json() for entry in self.buffer]} if self.buffer else {}
        return rest | {"position": dataclasses.asdict(self.position)} | buffer

    def restored(self, arrays: Mapping[str, Any], numbers: Mapping[str, Any]) -> "State":
        """The state of a checkpoint with these arrays and numbers."""
        rest = {name: numbers[name] for name in ("step", "accuracy", "best", "form")}
        rest |= {"phase": numbers.get("phase"), "reference": arrays.get("reference")}
        rest |= {"buffer": tuple(map(Entry.from_json, numbers.get("buffer", ())))}
        position = Position(**numbers["position"])
        return State(trees=arrays["policies"], learner=arrays["learner"], position=position, **rest)
