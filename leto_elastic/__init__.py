"""leto_elastic: in-place repair of distributed PyTorch jobs under plain torchrun."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from leto_elastic.errors import CommunicatorLost, LetoError
    from leto_elastic.state.train_state import TrainState
    from leto_elastic.worker.step import Step

__all__ = [
    "CommunicatorLost",
    "LetoError",
    "TrainState",
    "__version__",
    "init",
    "is_shadow",
    "on_active",
    "run_dir",
    "steps",
]


def __getattr__(name: str) -> Any:
    # torchrun imports this package for its plugin; torch's heavy parts wait until a script asks for them
    if name == "TrainState":
        from leto_elastic.state.train_state import TrainState

        return TrainState
    if name in ("CommunicatorLost", "LetoError"):
        from leto_elastic import errors

        return getattr(errors, name)
    raise AttributeError(f"module 'leto_elastic' has no attribute {name!r}")


def init() -> None:
    """Join the job: make the default process group, backend "leto". Call it instead of `dist.init_process_group`.

    Raises:
        LetoError: this process was not started by a leto agent (see the message for how to start it).
    """
    from leto_elastic.worker import session

    session.start()


def steps(state: TrainState, *, until: int) -> Iterator[Step]:
    """Yield the steps of the training, up to and without number `until`.

    Example:
        >>> for step in leto.steps(state, until=1000):
        ...     with step:
        ...         loss = loss_fn(model(step.batch))
        ...         loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """
    from leto_elastic.worker import runner, session

    return runner.run(session.current(), state, until)


def on_active(function: Callable[[], object]) -> None:
    """Call `function` once in each process that is an active rank: now in a trainer, at its promotion in a shadow.

    For side effects that must happen once a rank, such as starting an experiment tracker or opening an output file.
    """
    from leto_elastic.worker import session

    session.current().on_active(function)


def is_shadow() -> bool:
    """Whether this process is a standby that has not been promoted (yet)."""
    from leto_elastic.worker import session

    return session.current().shadow


def run_dir() -> str:
    """The job's directory for events, logs and whatever the script wants to put there."""
    from leto_elastic.worker import session

    return session.current().welcome.run_dir
