"""When may tensors be used again that an aborted collective worked on?

After an abort most collectives end by themselves within a few milliseconds. Some sleep on in gloo (see `work`) and must
be abandoned: their group is kept alive, since its destructor would wait for them, until gloo's timeout ends them. But a
thread that still *computes* on the user's tensors must never be left behind. One that sleeps cannot go on: everything
that could wake it came over a connection, and they are closed. So a collective is abandoned only when no connection of
its epoch is left, gloo's event threads have had their turns since (they tell the workers what comes over connections,
their end included, and look at them every 10 ms), and then all of its workers have slept through a whole interval.
(gloo never closes a connection on which it expects the rest of a message for a buffer that is gone, and its event
thread then looks at it without end. So after a while open connections are disregarded, and a thread that has run for
long enough has had its turns.)
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
_TURNS = 2  # times that an event thread must have gone to sleep again
_SEEN = 0.05  # seconds of CPU with which one that never sleeps has seen everything, and only goes round and round
_TICK = 1.0 / os.sysconf("SC_CLK_TCK")


class _Activity(NamedTuple):
    name: str
    asleep: bool
    switches: tuple[int, int]  # voluntary ones first
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
            switches = int(fields["voluntary_ctxt_switches"]), int(fields["nonvoluntary_ctxt_switches"])
            asleep = fields.get("State", "").startswith("S")
            found[task.name] = _Activity(fields["Name"], asleep, switches, sum(map(int, times)) * _TICK)
    return found


def _told(begin: dict[str, _Activity]) -> bool:
    """Whether gloo's event threads have seen since `begin` all that was to be seen then."""
    now = _activity()
    return all(
        now[task].switches[0] - was.switches[0] >= _TURNS or now[task].cpu - was.cpu > _SEEN
        for task, was in begin.items()
        if was.name == _EVENTS and task in now
    )


def _asleep() -> bool:
    """Whether gloo's workers sleep through an interval."""
    before = _activity()
    time.sleep(_INTERVAL)
    after = _activity()
    if before.keys() != after.keys():
        return False
    workers = [task for task, activity in after.items() if activity.name == _WORKERS]
    return all(after[task].asleep and after[task].switches == before[task].switches for task in workers)


def settle(works: Iterable[LetoWork], connected: Callable[[], bool]) -> list[LetoWork]:
    """Wait until the works of an ended epoch are over or asleep for good; the latter are abandoned and returned.

    `connected` says whether a connection of the epoch is left.
    """
    pending = [work for work in works if not work.over]
    start, begin = time.monotonic(), _activity()
    while pending:
        if (not connected() or time.monotonic() - start > _CLOSING) and _told(begin) and _asleep():
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
