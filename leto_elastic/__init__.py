"""leto_elastic: in-place repair of distributed PyTorch jobs under plain torchrun."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
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
    "pause_watch",
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
    from leto_elastic.worker import loop, session

    return loop.run(session.current(), state, until)


def on_active(function: Callable[[], object]) -> None:
    """Call `function` once in each process that is an active rank: now in a trainer, at its promotion in a shadow.

    For side effects that must happen once a rank, such as starting an experiment tracker or opening an output file.
    """
    from leto_elastic.worker import session

    session.current().on_active(function)


def pause_watch() -> AbstractContextManager[None]:
    """While it is open this process may stand still for `hang.pause` seconds of the policy before it counts as hung.

    For what takes far longer than a step, such as an evaluation or a save to a slow disk; the other ranks may wait for
    it meanwhile. Nothing happens in a shadow, and in a process that no leto agent has started.

    Example:
        >>> with leto.pause_watch():
        ...     save(model)
    """
    from leto_elastic.worker import session

    return session.pause_watch()


def is_shadow() -> bool:
    """Whether this process is a standby that has not been promoted (yet)."""
    from leto_elastic.worker import session

    return session.current().shadow


def run_dir() -> str:
    """The job's directory for events, logs and whatever the script wants to put there."""
    from leto_elastic.worker import session

    return session.current().welcome.run_dir
