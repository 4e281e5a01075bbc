"""`<run_dir>/events.jsonl`: what happened to a job, one JSON object a line.

Each line has `time` (unix seconds) and `event`; the other fields are those of `EVENTS`, and a line may have more.
A line is written by one `write` on a descriptor opened with `O_APPEND`: it is whole or absent, also when its writer is
killed, and several writers do not mix. A full disk must not end a training run, so a line that cannot be written is
counted and reported once on stderr, and the job goes on.

Times in fields ending in `_ms` are milliseconds. `stall_ms` of a recovery runs from the death to the first step
committed by every rank; `phases_ms` divides it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from leto_elastic.errors import ConfigError

RECOVERY_PHASES = ("detect", "plan", "abort", "rebuild", "attach", "resolve", "first_step")

EVENTS: Mapping[str, frozenset[str]] = {
    "run_started": frozenset({"run_id", "world_size"}),
    "worker_started": frozenset({"role", "rank", "slot", "pid"}),
    "shadow_ready": frozenset({"rank", "slot", "pid"}),
    "shadow_unfit": frozenset({"rank", "slot", "pid", "reason"}),
    "shadow_given_up": frozenset({"slot", "reason"}),
    "failure": frozenset({"rank", "slot", "pid", "cause", "step", "phase", "chunk"}),
    "hang": frozenset({"rank", "pid", "step", "reason", "stacks"}),
    "recovery": frozenset(
        {"epoch", "cause", "rank", "ranks", "action", "resolution", "lost_steps", "stall_ms", "phases_ms"}
    ),
    "replaced": frozenset({"rank", "slot", "pid"}),
    "suspect": frozenset({"rank", "epoch", "reason"}),
    "skipped": frozenset({"step", "reason", "total"}),
    "restart": frozenset({"reason"}),
    "spare": frozenset({"slots"}),
    "fenced": frozenset({"reason"}),
    "protected": frozenset({"rank", "version", "bytes", "seconds"}),
    "damaged": frozenset({"what", "reason"}),
    "refused": frozenset({"rank", "reason"}),
    "restored": frozenset({"ranks", "version", "seconds"}),
    "resumed": frozenset({"step", "slots", "dir", "agent"}),
    "run_finished": frozenset({"state"}),
}
"""Events, each with the fields it has at least."""


class EventLog:
    """Appends events to a file; one that is already there is renamed aside (`events.1.jsonl` and so on).

    Args:
        path: of the file; its directory is made when it is missing.
        clock: unix seconds.

    Raises:
        ConfigError: the file cannot be made.
    """

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self.lost = 0
        self._clock = clock
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _rename_aside(self.path)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT  # and not inherited, as all that os.open returns
            self._fd: int | None = os.open(self.path, flags, 0o644)
        except OSError as error:
            raise ConfigError(
                f"the run directory {self.path.parent} cannot be written: {error.strerror}; "
                "choose another one with --rdzv-conf run_dir=PATH"
            ) from error

    def write(self, event: str, **fields: object) -> None:
        """Append one event. Fields may be anything that msgspec turns into JSON. After `close` it does nothing."""
        if self._fd is None:
            return
        line = msgspec.json.encode({"time": self._clock(), "event": event, **fields}) + b"\n"
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            self._lose(str(error.strerror))
        else:
            if written != len(line):
                self._lose("only a part of a line could be written")

    def _lose(self, reason: str) -> None:
        self.lost += 1
        if self.lost == 1:
            print(f"leto: {self.path} is incomplete from here on: {reason}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _rename_aside(path: Path) -> None:
    if not path.exists():
        return
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)


def read(path: str | Path) -> Iterator[dict[str, object]]:
    """The events of a file, oldest first. A last line without its end (a write under way) is left out."""
    with Path(path).open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield msgspec.json.decode(line, type=dict[str, object])


def complaints(event: Mapping[str, object]) -> list[str]:
    """What is wrong with the shape of an event; empty when nothing is."""
    name = event.get("event")
    if not isinstance(name, str) or name not in EVENTS:
        return [f"unknown event {name!r}"]
    found = [f"{name}: {key} is missing" for key in sorted((EVENTS[name] | {"time"}) - event.keys())]
    if name == "recovery" and event.get("resolution") not in ("forward", "rerun"):
        found.append(f"recovery: resolution is {event.get('resolution')!r}")
    phases = event.get("phases_ms")
    if name == "recovery" and (not isinstance(phases, dict) or set(phases) != set(RECOVERY_PHASES)):
        found.append(f"recovery: phases_ms is {phases!r}, it needs {', '.join(RECOVERY_PHASES)}")
    return found
