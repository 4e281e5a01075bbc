"""One child of the agent: its end is seen at once, and is told once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from leto_elastic.launch import tripwire

_LAST = 19

_BREATH_SECONDS = 0.0005
_BREATHS = 100
"""After a trip: how often, and for how long in all, the other threads of a dying process are looked at."""


class Exit(NamedTuple):
    """How a process ended: exit code, or minus the signal's number; `noticed` in monotonic seconds."""

    code: int
    noticed: float


class Process:
    """A process that the zygote started and the kernel made a child of this agent.

    Every worker leads a session and process group of its own. Whatever is left of the group when its leader ends (data
    loaders) is killed, before the leader is reaped and its number could mean somebody else.

    Args:
        pid: of the child.
        wire: its armed tripwire, or None; the caller's to close.
        on_exit: called once, when no code of the process runs any more.
        on_reaped: called once after that, when the process is gone.
    """

    def __init__(
        self, pid: int, wire: int | None, on_exit: Callable[[Exit], None], on_reaped: Callable[[], None]
    ) -> None:
        self.pid = pid
        self.exit: Exit | None = None
        self._on_exit = on_exit
        self._on_reaped = on_reaped
        self._pidfd = os.pidfd_open(pid)
        self._gone = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._readable)
        if wire is not None:
            tripwire.watch(wire, self._tripped)

    def _tripped(self) -> None:
        """In the thread of the tripwire."""
        noticed = time.monotonic()
        try:
            self._loop.call_soon_threadsafe(self._breathing, noticed, _BREATHS)
        except RuntimeError:
            pass  # the loop is closed: this agent has given the process up

    def _breathing(self, noticed: float, looks: int) -> None:
        if self.exit is not None:
            return
        code = tripwire.last_breath(self.pid)
        if code is not None:
            self._tell(Exit(code, noticed))
            self.renice(_LAST)  # tearing it down takes long, and its replacement needs the processor now
        elif looks > 0:
            self._loop.call_later(_BREATH_SECONDS, self._breathing, noticed, looks - 1)

    def _readable(self) -> None:
        noticed = time.monotonic()
        seen = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if seen is None:
            return
        self._loop.remove_reader(self._pidfd)
        try:
            self._tell(Exit(seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status, noticed))
        finally:
            self._signal_group(signal.SIGKILL)
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
            os.close(self._pidfd)
            self._gone = True
            self._on_reaped()

    def _tell(self, end: Exit) -> None:
        if self.exit is None:
            self.exit = end
            self._on_exit(end)

    def signal(self, number: int) -> None:
        """Send a signal to the process and its group; nothing happens when it is gone."""
        if not self._gone and not self._signal_group(number):
            self.signal_alone(number)  # it has not come as far as having a group

    def signal_alone(self, number: int) -> None:
        """Send a signal to the process only."""
        if not self._gone:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                pass

    def renice(self, value: int) -> None:
        """Set the niceness of every thread of the process; lowering it needs a privilege.

        Raises PermissionError when that is missing.
        """
        try:
            threads = [int(entry.name) for entry in Path(f"/proc/{self.pid}/task").iterdir()]
        except FileNotFoundError:
            return
        for thread in threads:
            try:
                os.setpriority(os.PRIO_PROCESS, thread, value)
            except ProcessLookupError:
                pass

    def _signal_group(self, number: int) -> bool:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        except PermissionError:
            return False  # the group is of a program that changed its user
        return True
