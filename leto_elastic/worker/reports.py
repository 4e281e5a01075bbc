"""What a trainer tells its agent about its state."""

from __future__ import annotations

import logging
from typing import Any

from leto_elastic import wire
from leto_elastic.errors import StateError
from leto_elastic.state import layout, pack
from leto_elastic.state.layout import Manifest
from leto_elastic.worker.session import Session

log = logging.getLogger(__name__)


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
        """This process is about to end by an exception."""
        self._session.link.send(wire.Failing(step=step, reason=f"{type(error).__name__}: {error}"[:2000]))
