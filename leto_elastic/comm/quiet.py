"""When may tensors be used again that an aborted collective worked on?

After an abort most collectives end by themselves within a few milliseconds. Some sleep on in gloo (see `work`) and must
be abandoned: their group is kept alive, since its destructor would wait for them, until gloo's timeout ends them. But a
thread that still *computes* on the user's tensors must never be left behind. One that sleeps cannot go on: everything
that could wake it came over a connection, and they are closed. So a collective is abandoned only when no connection of
its epoch is left and all of gloo's threads have slept through a whole interval: its workers, and the event thread that
tells them what comes over the connections, their end included. (gloo never closes a connection on which it expects the
rest of a message for a buffer that is gone, and its event thread then looks at it without end. So after a while open
connections are disregarded, and so is an event thread that has run for long enough to have seen them all.)
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from leto_elastic.comm.work import LetoWork

_WORKERS = "pt_gloo_runloop"  # name of gloo's worker threads in torch
_EVENTS = "gloo_tcp_loop"  # and of its event threads
_INTERVAL = 0.005  # seconds that they have to sleep
_LOOK = 0.001  # seconds between two looks at what is still pending
_CLOSING = 0.2  # seconds after which open connections are disregarded
_SEEN = 0.05  # seconds of CPU with which an event thread has seen everything, and only goes round and round
_TICK = 1.0 / os.sysconf("SC_CLK_TCK")


class _Activity(NamedTuple):
    name: str
    asleep: bool
    switches: tuple[str, ...]
    cpu: float


def _activity() -> dict[str, _Activity]:
    """State, context switches and CPU seconds of each of gloo's threads in this process."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            lines = (task / "status").read_text().splitlines()
            times = (task / "stat").read_text().rpartition(") ")[2].split()[11:13]
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended meanwhile
        fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if fields.get("Name") in (_WORKERS, _EVENTS):
            switches = tuple(value for name, value in fields.items() if name.endswith("ctxt_switches"))
            asleep = fields.get("State", "").startswith("S")
            found[task.name] = _Activity(fields["Name"], asleep, switches, sum(map(int, times)) * _TICK)
    return found


def _asleep(begin: dict[str, _Activity] | None = None) -> bool:
    """Whether they sleep through an interval; but for event threads that are busy in vain since `begin`."""
    before = _activity()
    time.sleep(_INTERVAL)
    after = _activity()
    if before.keys() != after.keys():
        return False
    for task, now in after.items():
        if now.name == _EVENTS and begin is not None and task in begin and now.cpu - begin[task].cpu > _SEEN:
            continue
        if not now.asleep or now.switches != before[task].switches:
            return False
    return True


def settle(works: Iterable[LetoWork], connected: Callable[[], bool]) -> list[LetoWork]:
    """Wait until the works of an ended epoch are over or asleep for good; the latter are abandoned and returned.

    `connected` says whether a connection of the epoch is left.
    """
    pending = [work for work in works if not work.over]
    start, begin = time.monotonic(), _activity()
    while pending:
        if (not connected() or time.monotonic() - start > _CLOSING) and _asleep(begin):
            pending = [work for work in pending if not work.over]
            for work in pending:
                work.abandon()
            return pending
        time.sleep(_LOOK)
        pending = [work for work in pending if not work.over]
    return []


class Parked:
    """Groups that cannot be destroyed yet.

    They are also held by a reference that only `release` gives back, so that the end of the interpreter does not
    destroy, and wait for, them either.
    """

    def __init__(self) -> None:
        self._groups: list[tuple[dist.ProcessGroup, list[LetoWork]]] = []

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: dist.ProcessGroup, works: list[LetoWork]) -> None:
        """Keep `group` until all of `works` are over."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self._groups.append((group, works))

    def release(self) -> None:
        """Let go of those whose works are over."""
        kept = []
        for group, works in self._groups:
            if all(work.over for work in works):
                ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))
            else:
                kept.append((group, works))
        self._groups = kept
