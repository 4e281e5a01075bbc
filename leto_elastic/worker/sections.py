"""What surrounds the sections, the periodic work between two steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from leto_elastic.state import rng
from leto_elastic.state.header import Phase, Position
from leto_elastic.state.model import flags, set_flags
from leto_elastic.state.train_state import TrainState


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
