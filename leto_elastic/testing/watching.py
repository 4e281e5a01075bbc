"""What a job under test says: its events, waited for, and the digests that its ranks print."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from leto_elastic.observe import events as event_log
from leto_elastic.testing.processes import JobError

Event = dict[str, object]
T = TypeVar("T")

_POLL = 0.005
_DIGEST = re.compile(r"digest rank=(\d+) step=(\d+) sha256=([0-9a-f]{64})")


class Digest(NamedTuple):
    """State of a rank after `step` steps, as its script printed it."""

    step: int
    sha256: str


class EventFile:
    """A file of events, read again only when it has changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[tuple[int, int], list[Event]] = ((0, 0), [])

    @property
    def inode(self) -> int:
        """0 when there is no such file."""
        return self._version()[0]

    def events(self) -> list[Event]:
        """All events written so far, none when there is no such file."""
        version = self._version()
        if version != self._seen[0]:
            try:
                self._seen = (version, list(event_log.read(self.path)))
            except FileNotFoundError:  # renamed aside just now
                return []
        return self._seen[1]

    def _version(self) -> tuple[int, int]:
        """Inode and size; zeros without a file."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return 0, 0
        return status.st_ino, status.st_size


class Watched(ABC):
    """What a job of one agent and one of several have in common. Deadlines are its own."""

    deadline: float
    _end: float

    @abstractmethod
    def events(self) -> list[Event]:
        """All events written so far."""

    @abstractmethod
    def error(self, problem: str) -> JobError:
        """The error to raise about this job."""

    @abstractmethod
    def _hopeless(self, within: float) -> str | None:
        """Why no further event can be expected, if that is so after at most `within` seconds."""

    def wait_event(self, event: str, count: int = 1, **fields: object) -> Event:
        """The event number `count` (from 1) with this name and these fields, as soon as it is written.

        Raises JobError at the deadline, or when torchrun ends without that event.
        """
        seen: list[Event] = []

        def look() -> Event | None:
            seen[:] = [e for e in self.events() if e["event"] == event and fields.items() <= e.items()]
            return seen[count - 1] if len(seen) >= count else None

        return self.wait_for(look, lambda: f"event {event} {fields or ''} number {count} ({len(seen)} seen)")

    def wait_for(self, look: Callable[[], T | None], wanted: Callable[[], str], every: float = _POLL) -> T:
        """What `look` returns, called every few seconds (or fractions of one) until that is not None.

        Raises JobError at the deadline, or when torchrun ends without it; `wanted` says without what.
        """
        while True:
            hopeless = self._hopeless(0)
            if (found := look()) is not None:
                return found
            if hopeless is not None:
                raise self.error(f"{hopeless} without {wanted()}")
            if time.monotonic() > self._end:
                raise self.error(f"no {wanted()} within {self.deadline:g} s")
            self._hopeless(every)

    def recoveries(self) -> list[Event]:
        """All events `recovery` so far."""
        return [event for event in self.events() if event["event"] == "recovery"]

    def pid_of(self, rank: int) -> int:
        """The process that trains `rank` now, as far as the events tell. Raises JobError when they do not."""
        pid = shadow = None
        for event in self.events():
            if event["event"] == "recovery" and rank in _as_list(event.get("ranks", [event.get("rank")])):
                pids = event.get("pids")
                pid = pids.get(str(rank), pid) if isinstance(pids, dict) else shadow
            elif event.get("rank") != rank:
                continue
            elif event["event"] == "worker_started" and event.get("role") == "trainer":
                pid = event.get("pid")
            elif event["event"] == "shadow_ready":
                shadow = event.get("pid")
        if not isinstance(pid, int):
            raise self.error(f"no event tells the process of rank {rank}")
        return pid

    def _check_events(self) -> None:
        found = [complaint for event in self.events() for complaint in event_log.complaints(event)]
        if found:
            raise self.error("events: " + "; ".join(found))


def digests_in(output: str) -> dict[int, Digest]:
    """By rank, from the lines `digest rank=R step=N sha256=HEX`; the last one of a rank counts."""
    return {int(rank): Digest(int(step), sha) for rank, step, sha in _DIGEST.findall(output)}


def _as_list(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else [value]
