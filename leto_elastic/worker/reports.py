"""What a trainer tells its agent about its state."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from leto_elastic import wire
from leto_elastic.errors import NotFinite, StateError
from leto_elastic.state import layout, pack
from leto_elastic.state.layout import Manifest
from leto_elastic.worker.memory import is_out_of_memory
from leto_elastic.worker.session import Session
from leto_elastic.worker.step import StepLost

log = logging.getLogger(__name__)

_FINAL = (KeyboardInterrupt, SystemExit, NotFinite)
"""Nobody is to take over from a process that ends by one of these."""


class Reports:
    """One trainer's messages.

    Args:
        resolution: how this process came into its epoch; told with the first commit in it.
    """

    def __init__(self, session: Session, resolution: str) -> None:
        self._session = session
        self._resolution: str | None = resolution

    def setup(self, calls: bytes, first_batch: Any) -> None:
        """What a shadow of this slot needs to run the script up to its first step, and to rehearse that."""
        try:
            batch = pack.pack(first_batch, "the first batch")
        except StateError as error:
            log.info("%s; shadows take a first batch of their own", error)
            batch = b""
        record = pack.pack({"setup": calls, "batch": batch})
        self._session.link.send_blob(lambda size: wire.SetupRecord(size=size), record, "leto-setup")

    def manifest(self, manifest: Manifest) -> None:
        """The layout of the segments; with the first one the slot becomes protected."""
        self._session.link.send_blob(
            lambda size: wire.Manifest(version=manifest.version, size=size), layout.encode(manifest), "leto-manifest"
        )

    def joined(self, resolution: str) -> None:
        """This process is in a new epoch; nothing is sent before its first commit there."""
        self._resolution = resolution

    def committed(self, step: int) -> None:
        """A step whose body ran in this epoch is committed (or the end is agreed); only the first one is told."""
        if self._resolution is None:
            return
        session = self._session
        session.mark("first_step")
        session.link.send(
            wire.Committed(
                epoch=session.fabric.epoch, step=step, resolution=self._resolution, marks=dict(session.marks)
            )
        )
        self._resolution = None
        session.marks.clear()

    def failing(self, step: int, error: BaseException) -> None:
        """This process is about to end by an exception; some of them end the job."""
        if isinstance(error, _FINAL):
            told = f"rank {self._session.rank} left the training in step {step} by {reason_of(error)}"
            self._session.link.send(wire.Quitting(step=step, reason=told))
        elif isinstance(error, Exception):
            oom = is_out_of_memory(error)
            self._session.link.send(wire.Failing(step=step, reason=reason_of(error), oom=oom))

    @contextmanager
    def telling(self, step: int) -> Iterator[None]:
        """What is raised inside, unless it is a lost step, ends this process."""
        try:
            yield
        except StepLost:
            raise
        except BaseException as error:  # boundary: told to the agent, then raised
            self.failing(step, error)
            raise

    def skipped(self, step: int, reason: str) -> None:
        """A step is committed without an update."""
        self._session.link.send(wire.Skipped(step=step, reason=reason))


def reason_of(error: BaseException) -> str:
    """Type and message."""
    return f"{type(error).__name__}: {error}"[:2000]
