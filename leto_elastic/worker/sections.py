"""What surrounds the sections, the periodic work between two steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from leto_elastic.comm.fabric import Fabric
from leto_elastic.state import rng
from leto_elastic.state.header import Phase, Position
from leto_elastic.state.model import flags, set_flags
from leto_elastic.state.train_state import TrainState
from leto_elastic.worker.reports import Reports
from leto_elastic.worker.step import StepLost


def start_of(state: TrainState, step: int, section: int | None, slot: int) -> Position:
    """The start of `step`, before its due sections from index `section` on (None: after them)."""
    due = [i for i in state.due(step) if section is not None and i >= section]
    if due:
        return Position(step, Phase.SECTION, slot=slot, chunk=due[0])
    return Position(step, Phase.COMPUTE, slot=slot)


@contextmanager
def no_trace(model: nn.Module) -> Iterator[None]:
    """Random numbers drawn inside, and modules put into train or eval mode, change nothing for the training."""
    modes = [(module, module.training) for module in model.modules()]
    random, sync = rng.capture(), flags(model)
    try:
        yield
    finally:
        rng.restore(random)
        set_flags(model, sync)
        for module, training in modes:
            module.training = training


def run_section(state: TrainState, index: int, fabric: Fabric, reports: Reports, step: int) -> None:
    """Run one. A lost collective raises out of it here, unlike in a step: what it reports is never garbage.

    Raises StepLost when a lost communicator explains what it raised, or it ended in a lost epoch.
    """
    with reports.telling(step):
        try:
            with no_trace(state.model):
                state.sections[index].run()
        except Exception as error:  # boundary: raised, unless a lost communicator explains it
            if not fabric.poisoned:
                raise
            raise StepLost(fabric.reason) from error
        if fabric.poisoned:
            raise StepLost(fabric.reason)
