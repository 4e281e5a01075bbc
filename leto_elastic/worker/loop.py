"""`leto.steps`: the loop of a trainer, or of a shadow that may become one."""

from __future__ import annotations

from collections.abc import Iterator

from leto_elastic.errors import LetoError
from leto_elastic.state.train_state import TrainState
from leto_elastic.worker.runner import Runner
from leto_elastic.worker.session import Session
from leto_elastic.worker.shadow import ShadowLife
from leto_elastic.worker.step import Step


def run(session: Session, state: TrainState, until: int) -> Iterator[Step]:
    """The generator behind `leto.steps`."""
    if session.running:
        raise LetoError("leto.steps() is already running; one loop at a time, and one a job")
    if until < 1:
        raise LetoError(f"leto.steps(until={until}): the number of steps must be at least 1")
    session.running = True
    runner = Runner(session, state, until)
    if session.shadow:
        yield from ShadowLife(session, state, runner).live()
    else:
        runner.start()
    yield from runner.loop()
