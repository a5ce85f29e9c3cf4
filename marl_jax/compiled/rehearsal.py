"""The rehearsal of a form: one episode without tokens, which counts its calls and refuses forms unlike their script."""

import inspect
import types
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marl_jax.compiled.cast import Cast
from marl_jax.compiled.readers import Read, form_of
from marl_jax.compiled.refusal import NoArrayForm
from marl_jax.compiled.script import Cue
from marl_jax.compiled.stage import Stage, StageCall, checked
from marl_jax.own import error_line, file_of

_calls: weakref.WeakKeyDictionary[Cast, int] = weakref.WeakKeyDictionary()  # calls per episode


def count_calls(cast: Cast, question: int = 0) -> int:
    """The largest number of calls that an episode makes.

    Refuses forms that do not match their script and, given the width of a question, prompts that may not fit.
    """

    def rehearse() -> list[int]:
        stage, workflow = _Rehearsal(cast, question), cast.parts.workflow
        form: Any = workflow.in_arrays
        try:
            inspect.signature(form).bind(stage, **workflow.settings)
        except TypeError as error:
            raise NoArrayForm(
                f"the form of workflow '{workflow.name}' takes other settings than the workflow ({error})"
            ) from None
        try:
            answer = form(stage, **workflow.settings)
        except jax.errors.TracerBoolConversionError:
            raise NoArrayForm(
                f"the form of workflow '{workflow.name}' has an if on an array (use a mask, as in stage.end)"
            ) from None
        except NoArrayForm:
            raise
        except Exception as error:
            raise NoArrayForm(
                f"the form of workflow '{workflow.name}' raised {error_line(error, file_of(form))}"
            ) from error
        checked(
            answer, jnp.integer, (1,), f"the form of '{workflow.name}' must return the place of an answer"
        )
        stage.read(stage.lines)
        if stage.more:
            raise NoArrayForm("the form leaves out calls of its workflow's script")
        for texts in stage.texts:  # checked here, where it is known which answers the form follows
            cast.script(texts)
        return [0] * len(stage.lines)

    if cast not in _calls or question:  # traced, because eager operations would be compiled one by one
        _calls[cast] = len(jax.eval_shape(rehearse))
    calls, most = _calls[cast], cast.config.rollout.limits.max_calls
    if calls > most:
        raise NoArrayForm(
            f"an episode makes up to {calls} calls, and rollout.limits.max_calls ends it after {most}"
        )
    return calls


class _Rehearsal(Stage):
    """One episode in which no call samples tokens."""

    def __init__(self, cast: Cast, width: int):
        task = types.SimpleNamespace(id=(0,), question=np.zeros((1, width), np.uint8))
        super().__init__(cast, {}, task, lambda calls: calls, episodes=1)

    def _sample(self, policy: str, lines: list[StageCall], seats: list[list[Cue | None]]) -> None:
        pass

    def _read(self, lines: list[StageCall]) -> None:
        form_of(lines[0].cue.read, lines[0].cue.role, self.family)
        zero = jnp.zeros(1, jnp.int32)
        for line in lines:
            line.read = Read(zero > 0, zero - 1, zero > 0, zero > 0, zero[:, None], zero[:, None], zero)
