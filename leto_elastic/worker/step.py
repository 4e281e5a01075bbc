"""What the user's loop sees: one step."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch

from leto_elastic.errors import CommunicatorLost, LetoError, StateError

if TYPE_CHECKING:
    from leto_elastic.worker.runner import Runner

Outcome = Literal["new", "entered", "committed", "lost"]


class StepLost(CommunicatorLost):
    """Ends the body of a step that cannot be committed in this epoch. Not to be caught."""


def refuse_misuse(step: int, *, inside: bool, again: bool) -> None:
    """Raises LetoError for an `optimizer.step()` that is not `inside` of a step, or there for the second time."""
    if not inside:
        raise LetoError("optimizer.step() outside of `with step:`; the training state may only change in a step")
    if again:
        raise StateError(f"optimizer.step() was called twice in step {step}; accumulate gradients and call it once")


def refuse_scaled(optimizer: torch.optim.Optimizer) -> None:
    """Raises StateError when a GradScaler has left it to the optimizer to unscale the gradients."""
    if getattr(optimizer, "grad_scale", None) is not None:
        raise StateError("call scaler.unscale_(optimizer) before scaler.step(optimizer): gradients are kept unscaled")


class Step:
    """One pass of the body; `with step:` is where failures stop.

    Attributes:
        number: which step, from 0.
        batch: the batch of this step, the same one when the step is run again. It must not be changed in place.
        rehearsal: True while a shadow warms up; whatever the body does then is thrown away. Skip side effects.
    """

    __slots__ = ("_runner", "batch", "number", "outcome", "rehearsal")

    def __init__(self, runner: Runner, number: int, batch: Any, *, rehearsal: bool) -> None:
        self._runner = runner
        self.number = number
        self.batch = batch
        self.rehearsal = rehearsal
        self.outcome: Outcome = "new"

    def __enter__(self) -> Step:
        self.outcome = "entered"
        self._runner.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._runner.leave(self, error)
