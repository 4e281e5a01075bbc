"""Signs of life of a trainer, in its header, where its agent reads them.

A thread writes the time some ten times a second. It needs the interpreter for it, so it falls silent when the process
is stopped, and when a thread holds the interpreter's lock in C for ever. It also notes which group's collective this
process has entered and cannot finish. The collectives themselves are only counted: that is all a step pays for.

The agent may ask for the stacks of the process (see `observe.stacks`), by a signal to the thread of this module: so no
system call of the user's is interrupted.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from leto_elastic.comm.fabric import Fabric
from leto_elastic.observe import stacks
from leto_elastic.recovery.policy import HangPolicy
from leto_elastic.state.header import GROUPS, Header, key_of

_SLOWEST = 0.1
"""Seconds between two beats, at most."""


class Counter:
    """Counts collectives in a header; see `leto_elastic.comm.fabric.Watch`."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._lines: dict[str, int] = {}
        header.forget_calls()

    def knows(self, group: str) -> None:
        """There is such a group."""
        if group not in self._lines:
            line = len(self._lines)
            self._lines[group] = line if line < GROUPS else -1
            if line < GROUPS:
                self._header.set_group(line, key_of(group))

    def entered(self, group: str, signature: int) -> None:
        """A collective of this group begins."""
        line = self._lines.get(group)
        if line is None:
            self.knows(group)
            line = self._lines[group]
        self._header.entered(line, signature)

    def restart(self) -> None:
        """A new epoch: begin at 0 in every rank."""
        self._header.forget_calls()
        for group, line in self._lines.items():
            if line >= 0:
                self._header.set_group(line, key_of(group))


class Heartbeat:
    """Beats from now on, for as long as the process lives.

    Args:
        header: of this trainer.
        fabric: its communicators.
        policy: how long it may be silent, and how long a pause may be.
        file: for its stacks.
    """

    def __init__(self, header: Header, fabric: Fabric, policy: HangPolicy, file: Path) -> None:
        self._header = header
        self._fabric = fabric
        self._pause = policy.pause
        self._interval = min(_SLOWEST, policy.heartbeat / 10)
        header.forget()
        fabric.count_in(Counter(header))
        stacks.answer(file)
        self._ready = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="leto-heartbeat", daemon=True)
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        """Beat no more, and count nothing: nobody watches this process then."""
        self._stopped = True
        self._thread.join()
        self._fabric.count_in(None)
        self._header.forget()

    def _run(self) -> None:
        header, fabric, interval = self._header, self._fabric, self._interval
        header.thread = threading.get_native_id()
        header.beat = time.monotonic()
        self._ready.set()
        while True:
            time.sleep(interval)
            if self._stopped:
                return
            header.beat = time.monotonic()
            group = fabric.pending()
            header.waiting = key_of(group) if group else 0

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """See `leto_elastic.pause_watch`."""
        before = self._header.paused
        self._header.paused = time.monotonic() + self._pause
        try:
            yield
        finally:
            self._header.paused = before
