"""The processes of one agent: started through the zygote, known by token, heard through their links, ended for good."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from leto_elastic import wire
from leto_elastic.launch import tripwire
from leto_elastic.launch.forker import Forker
from leto_elastic.launch.links import Link, Listener
from leto_elastic.launch.process import Exit, Process
from leto_elastic.launch.setup import Entry

_LAST_RESORT = 5.0
"""Seconds that SIGKILL has, at least, to end a process."""


class Audience(Protocol):
    """Who is told what the crew does. `key` numbers a process; it is never used twice."""

    def process_started(self, key: int, pid: int) -> None: ...

    def process_exited(self, key: int, pid: int, end: Exit) -> None: ...

    def process_greeted(self, key: int) -> None:
        """A process said Hello, never before it is told to be started; answer it by `Crew.send`."""
        ...

    def message_arrived(self, key: int, message: wire.FromWorker, fds: list[int]) -> None:
        """The descriptors belong to the callee."""
        ...

    def broken(self, error: BaseException) -> None:
        """Something that cannot fail has failed."""
        ...


@dataclass
class _Worker:
    token: str
    urgent: int = 0  # signal to send as soon as it runs
    process: Process | None = None
    link: Link | None = None
    deadline: asyncio.TimerHandle | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """What to start: an entry for a local rank, its environment, niceness and streams (which stay the caller's)."""

    entry: Entry
    local_rank: int
    env: dict[str, str]
    nice: int
    stdout: int
    stderr: int


class Crew:
    """All processes of an agent.

    Args:
        forker: starts processes.
        audience: is told.
    """

    def __init__(self, forker: Forker, audience: Audience) -> None:
        self._forker = forker
        self._audience = audience
        self._loop = asyncio.get_running_loop()
        self._listener = Listener(self._introduced)
        self._workers: dict[int, _Worker] = {}
        self._keys: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._last = 0
        self._reaping = 0  # processes that have been started and not been reaped
        self._changed = asyncio.Event()

    def spawn(self, job: Job) -> int:
        """Start a process; returns its key at once, `process_started` or `broken` follows."""
        self._last += 1
        key = self._last
        worker = self._workers[key] = _Worker(secrets.token_hex(16))
        self._keys[worker.token] = key
        streams = os.dup(job.stdout), os.dup(job.stderr), tripwire.make()
        task = self._loop.create_task(self._spawn(key, worker, job, streams))
        self._tasks.add(task)
        task.add_done_callback(self._spawned)
        return key

    def _spawned(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            error = task.exception()
            if error is not None:
                self._audience.broken(error)

    async def _spawn(self, key: int, worker: _Worker, job: Job, streams: tuple[int, int, int]) -> None:
        env = {**job.env, "LETO_SOCKET": self._listener.path, "LETO_TOKEN": worker.token}
        try:
            pid = await self._forker.fork(
                job.entry.kind,
                job.entry.of(job.local_rank),
                env,
                nice=job.nice,
                stdout=streams[0],
                stderr=streams[1],
                tripwire=streams[2],
            )
            trip = None if job.entry.kind == "exec" else streams[2]
            self._reaping += 1
            worker.process = Process(pid, trip, lambda end: self._exited(key, end), self._reaped)
        finally:
            for fd in streams:
                os.close(fd)
            if worker.process is None:
                self._forget(key)
        if worker.urgent:
            worker.process.signal(worker.urgent)
        self._audience.process_started(key, pid)
        if worker.link is not None:  # it was quicker than the zygote's answer
            self._audience.process_greeted(key)

    # ---- one process

    def send(self, key: int, message: wire.FromAgent, fds: tuple[int, ...] = ()) -> None:
        """Send a message; a process that is gone is no error."""
        worker = self._workers.get(key)
        if worker is not None and worker.link is not None:
            worker.link.send(message, list(fds))

    def signal(self, key: int, number: int, *, group: bool = True) -> None:
        """Send a signal to a process, and to its group; one that is still being started gets it later."""
        worker = self._workers.get(key)
        if worker is None:
            return
        if worker.process is None:
            worker.urgent = number
        elif group:
            worker.process.signal(number)
        else:
            worker.process.signal_alone(number)

    def renice(self, key: int, value: int) -> None:
        """Set a process's niceness, as far as this agent may."""
        worker = self._workers.get(key)
        if worker is not None and worker.process is not None:
            try:
                worker.process.renice(value)
            except PermissionError:
                print(
                    f"leto: process {worker.process.pid} stays niced: that takes CAP_SYS_NICE, or shadow.nice: 0 in "
                    "the policy",
                    file=sys.stderr,
                )

    def deadline(self, key: int, seconds: float | None) -> None:
        """Kill the process after so many seconds, replacing the deadline it had; None: none any more."""
        worker = self._workers.get(key)
        if worker is None:
            return
        if worker.deadline is not None:
            worker.deadline.cancel()
        worker.deadline = None if seconds is None else self._loop.call_later(seconds, self.signal, key, signal.SIGKILL)

    # ---- all of them

    async def stop(self, number: int, seconds: float, now: Callable[[int], bool]) -> None:
        """End all processes: by `number`, or at once for those that `now` says, and after `seconds` by SIGKILL."""
        for key in list(self._workers):
            self.signal(key, signal.SIGKILL if now(key) else number)
        if await self._all_gone(0.0 if number == signal.SIGKILL else seconds):
            return
        self.kill_all()
        if not await self._all_gone(max(_LAST_RESORT, seconds)):
            pids = sorted(worker.process.pid for worker in self._workers.values() if worker.process is not None)
            print(f"leto: processes {pids} do not end, not even by SIGKILL; giving up on them", file=sys.stderr)

    def kill_all(self) -> None:
        """SIGKILL to every process."""
        for key in list(self._workers):
            self.signal(key, signal.SIGKILL)

    def close(self) -> None:
        """After `stop`: close the listener."""
        for task in list(self._tasks):
            task.cancel()
        self._listener.close()

    async def _all_gone(self, seconds: float) -> bool:
        end = self._loop.time() + seconds
        while self._workers or self._reaping:
            self._changed.clear()
            left = end - self._loop.time()
            if left <= 0:
                return False
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                return False
        return True

    # ---- what happens

    def _introduced(self, hello: wire.Hello, sock: socket.socket) -> bool:
        key = self._keys.get(hello.token)
        worker = self._workers[key] if key is not None else None
        if key is None or worker is None or worker.link is not None:
            return False
        worker.link = Link(
            sock,
            lambda message, fds: self._audience.message_arrived(key, message, fds),
            lambda reason: self._disconnected(key, reason),
        )
        if worker.process is not None:
            self._audience.process_greeted(key)
        return True

    def _disconnected(self, key: int, reason: str) -> None:
        """The end of a connection is no death, the pidfd tells that. A process that talks nonsense is killed."""
        worker = self._workers.get(key)
        if reason != "closed" and worker is not None and worker.process is not None:
            print(f"leto: killing process {worker.process.pid}: {reason}", file=sys.stderr)
            worker.process.signal(signal.SIGKILL)

    def _exited(self, key: int, end: Exit) -> None:
        worker = self._workers[key]
        assert worker.process is not None
        try:
            self._audience.process_exited(key, worker.process.pid, end)
        finally:
            if worker.deadline is not None:
                worker.deadline.cancel()
            if worker.link is not None:
                worker.link.close()
            self._forget(key)

    def _reaped(self) -> None:
        self._reaping -= 1
        self._changed.set()

    def _forget(self, key: int) -> None:
        worker = self._workers.pop(key)
        self._keys.pop(worker.token, None)
        self._changed.set()
