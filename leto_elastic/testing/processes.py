"""A command and all the processes that come of it: found, signalled, killed at once, and none of them left.

A process belongs to the command when it is of its session or has its mark in its environment, so neither a new session
nor an empty environment alone hides one. Every wait ends with one deadline; nothing waits for time to pass.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from leto_elastic.testing.faults import ENV

MARK = "LETO_TEST_JOB"

_POLL_MS = 5
_KILL_ROUNDS = 5


class JobError(AssertionError):
    """A job under test did not do what was expected; the message ends with its last output."""


class Resources(NamedTuple):
    """What a process holds: resident memory in bytes, open descriptors, threads."""

    rss: int
    fds: int
    threads: int


class Launched:
    """torchrun and its processes, started by entering the context.

    Args:
        command: torchrun's, or one that becomes torchrun (by `exec`).
        env: its whole environment, to which the mark is added.
        deadline: seconds until everything must have ended, from the start on.
        grace: seconds that the processes have to be gone after torchrun is.
    """

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], deadline: float, grace: float) -> None:
        self.command = list(command)
        self.deadline = deadline
        self.grace = grace
        self._mark = uuid.uuid4().hex
        self._env = {**env, MARK: self._mark}
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed by __exit__)
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._end = 0.0

    # ---- life

    def __enter__(self) -> Self:
        self._end = time.monotonic() + self.deadline
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=self._env,
            start_new_session=True,
        )
        self._pidfd = os.pidfd_open(self._process.pid)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.kill_agent()
            left = self.leftovers(self.grace)
            self._kill_leftovers()
            if left and error is None:
                names = "; ".join(f"{pid}: {name}" for pid, name in left)
                raise JobError(f"{len(left)} processes were still there {self.grace:g} s after torchrun's end: {names}")
        finally:
            os.close(self._pidfd)
            self._output.close()

    @property
    def pid(self) -> int:
        """Of torchrun, which is the agent."""
        return self._running().pid

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the job was not started; use it as a context manager")
        return self._process

    # ---- waiting

    def wait(self) -> int:
        """Exit code of torchrun, once it has ended; negative for a signal. Raises JobError at the deadline."""
        if not self.ended(max(0.0, self._end - time.monotonic())):
            raise self.error(f"torchrun was still running after {self.deadline:g} s")
        return self._running().wait()

    def wait_output(self, text: str) -> None:
        """Until the output contains `text`. Raises JobError at the deadline, or when torchrun ends without it."""
        while True:
            over = self.ended(0)
            if text in self.output():
                return
            if over:
                raise self.error(f"torchrun ended with exit code {self.wait()} without printing {text!r}")
            if time.monotonic() > self._end:
                raise self.error(f"{text!r} was not printed within {self.deadline:g} s")
            self.ended(_POLL_MS / 1000)

    def ended(self, within: float) -> bool:
        """Whether torchrun has ended after at most `within` seconds."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(within * 1000))

    def output(self) -> str:
        """What torchrun and its workers have printed so far, stdout and stderr together."""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")

    def error(self, problem: str) -> JobError:
        """The error to raise about this job: the problem, the command, and what was said last."""
        tail = "\n".join(self.output().splitlines()[-60:])
        last = "\n".join(str(event) for event in self._last_events())
        return JobError(f"{problem}\ncommand: {' '.join(self.command)}\nlast events:\n{last}\nlast output:\n{tail}")

    def _last_events(self) -> Sequence[object]:
        return ()

    # ---- hurting it

    def kill(self, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a process of this job. Raises JobError when it is none (so that a wrong pid hits nobody)."""
        if pid not in dict(self.processes()):
            raise self.error(f"process {pid} is not part of the job, {number.name} was not sent")
        _signal(pid, number)

    def signal_all(self, pids: Sequence[int], number: signal.Signals) -> list[int]:
        """Send a signal to those of the processes that are live ones of this job, within microseconds; which they were.

        Each is held by a descriptor before it is looked whose it is, so the signal cannot reach another process.
        """
        with contextlib.ExitStack() as stack:
            held = {}
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    held[pid] = os.pidfd_open(pid)
                    stack.callback(os.close, held[pid])
            mine = [pid for pid in held if self._is_mine(pid)]
            hit = []
            for pid in mine:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(held[pid], number)
                    hit.append(pid)
        return hit

    def kill_agent(self) -> None:
        """SIGKILL torchrun alone, unless it has ended; what it started should end by itself."""
        process = self._running()
        if process.poll() is None:
            process.kill()
            process.wait()

    def kill_all(self) -> None:
        """SIGKILL torchrun and then everything of it, like a machine that loses its power; all are gone afterwards.

        All processes are held by descriptors before the first signal, so the signals follow each other within
        microseconds and none can reach another process that was given the pid. Raises JobError when some outlive it.
        """
        pids = [pid for pid, _ in self.processes()]
        self.signal_all(sorted(pids, key=lambda pid: pid != self.pid), signal.SIGKILL)
        self.wait()
        self._kill_leftovers()
        if left := self.processes():
            raise self.error(f"processes outlived SIGKILL: {left}")

    def _kill_leftovers(self) -> None:
        for _ in range(_KILL_ROUNDS):  # what is killed may just have forked
            for pid, _name in self.processes():
                _signal(pid, signal.SIGKILL)
            if not self.leftovers(1.0):
                break

    # ---- its processes

    def processes(self) -> list[tuple[int, str]]:
        """(pid, command line) of the job's live processes: of its session, or with its mark in their environment."""
        return [(pid, _command(pid)) for pid in _pids() if pid != os.getpid() and self._is_mine(pid)]

    def _is_mine(self, pid: int) -> bool:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return False
        state, _, _, session = stat.rpartition(")")[2].split()[:4]
        mark = f"{MARK}={self._mark}".encode()
        return state not in "ZX" and (int(session) == self.pid or mark in environ.split(b"\0"))

    def leftovers(self, within: float) -> list[tuple[int, str]]:
        """The job's processes that are still there after at most `within` seconds."""
        end = time.monotonic() + within
        while left := self.processes():
            for pid, _ in left:
                if not gone(pid, max(0.0, end - time.monotonic())):
                    return self.processes()
        return []


def environment(faults: str, changes: Mapping[str, str] | None) -> dict[str, str]:
    """This process's environment as torchrun gets it."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", ENV: faults, **(changes or {})}


def resources(pid: int) -> Resources:
    """What a process holds now. Raises FileNotFoundError when it is gone."""
    status = Path(f"/proc/{pid}/status").read_text()
    values = dict(line.split(":", 1) for line in status.splitlines())
    return Resources(
        rss=int(values["VmRSS"].split()[0]) * 1024,
        fds=len(list(Path(f"/proc/{pid}/fd").iterdir())),
        threads=int(values["Threads"]),
    )


def gone(pid: int, within: float) -> bool:
    """Whether the process has ended after at most `within` seconds."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(within * 1000))
    finally:
        os.close(fd)


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return "(gone)"


def _signal(pid: int, number: signal.Signals) -> None:
    """Nothing happens when the process is gone already."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
