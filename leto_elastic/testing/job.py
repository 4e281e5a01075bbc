"""A torchrun job under test: started, watched through its events, hurt from outside, and ended with nothing left.

Every wait ends with the one deadline of the job, or as soon as torchrun ends. Nothing waits for time to pass:
`wait_event` waits for a line in `events.jsonl`, `wait` for the exit of torchrun. On leaving the `with` block whatever
is left of the job is killed, and reported as an error.

Example:
    >>> with Job("train.py", "--steps", "20", run_dir=tmp_path / "run") as job:
    ...     job.wait_event("shadow_ready", rank=2)
    ...     job.kill(job.pid_of(2))
    ...     job.expect_success()
    ...     assert job.recoveries()[0]["lost_steps"] == 0
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from leto_elastic.observe import events as event_log
from leto_elastic.testing.faults import ENV

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=leto")
MARK = "LETO_TEST_JOB"

_POLL_MS = 5
_KILL_ROUNDS = 5
_DIGEST = re.compile(r"digest rank=(\d+) step=(\d+) sha256=([0-9a-f]{64})")

Event = dict[str, object]


class JobError(AssertionError):
    """A job under test did not do what was expected; the message ends with its last output."""


class Digest(NamedTuple):
    """State of a rank after `step` steps, as its script printed it."""

    step: int
    sha256: str


class Resources(NamedTuple):
    """What a process holds: resident memory in bytes, open descriptors, threads."""

    rss: int
    fds: int
    threads: int


class Job:
    """A job, started by entering the context.

    Args:
        script: the training script; `args` are its arguments.
        run_dir: the job's run directory.
        nproc: workers.
        faults: `LETO_FAULTS` of the job.
        conf: more keys of `--rdzv-conf`.
        options: more options of torchrun.
        env: changes to the environment.
        deadline: seconds until everything must have ended, from the start on.
        launcher: the command that torchrun's options are appended to.
        grace: seconds that the job's processes have to be gone after torchrun is.
    """

    def __init__(
        self,
        script: str | Path,
        *args: str,
        run_dir: str | Path,
        nproc: int = 4,
        faults: str = "",
        conf: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        deadline: float = 120.0,
        launcher: Sequence[str] = TORCHRUN,
        grace: float = 5.0,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.deadline = deadline
        self.grace = grace
        pairs = ",".join(f"{key}={value}" for key, value in {"run_dir": str(run_dir), **(conf or {})}.items())
        self.command = [*launcher, f"--nproc-per-node={nproc}", f"--rdzv-conf={pairs}", *options, str(script), *args]
        self._mark = uuid.uuid4().hex
        self._env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            ENV: faults,
            **(env or {}),
            MARK: self._mark,
        }
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed by __exit__)
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._end = 0.0
        self._events_path = self.run_dir / "events.jsonl"
        self._stale = self._version()
        self._seen: tuple[tuple[int, int], list[Event]] = ((0, 0), [])

    # ---- life

    def __enter__(self) -> Job:
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
        process = self._running()
        try:
            if process.poll() is None:
                process.kill()
                process.wait()
            left = self.leftovers(self.grace)
            for _ in range(_KILL_ROUNDS):  # what is killed may just have forked
                for pid, _name in self.processes():
                    _signal(pid, signal.SIGKILL)
                if not self.leftovers(1.0):
                    break
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
        if not self._exited(max(0.0, self._end - time.monotonic())):
            raise self._error(f"torchrun was still running after {self.deadline:g} s")
        return self._running().wait()

    def expect_success(self) -> None:
        """Wait for the end; exit code 0 and events of the right shape, or JobError."""
        code = self.wait()
        if code != 0:
            raise self._error(f"torchrun ended with exit code {code}")
        found = [complaint for event in self.events() for complaint in event_log.complaints(event)]
        if found:
            raise self._error("events: " + "; ".join(found))

    def expect_failure(self) -> int:
        """Wait for the end; an exit code that is not 0, which is returned, or JobError."""
        code = self.wait()
        if code == 0:
            raise self._error("torchrun ended with exit code 0, a failure was expected")
        return code

    def wait_event(self, name: str, count: int = 1, **fields: object) -> Event:
        """The event number `count` (from 1) with this name and these fields, as soon as it is written.

        Raises JobError at the deadline, or when torchrun ends without that event.
        """
        while True:
            exited = self._exited(0)
            matching = [e for e in self.events() if e["event"] == name and fields.items() <= e.items()]
            if len(matching) >= count:
                return matching[count - 1]
            wanted = f"event {name} {fields or ''} number {count} ({len(matching)} seen)"
            if exited:
                raise self._error(f"torchrun ended with exit code {self.wait()} without {wanted}")
            if time.monotonic() > self._end:
                raise self._error(f"no {wanted} within {self.deadline:g} s")
            self._exited(_POLL_MS / 1000)

    def wait_output(self, text: str) -> None:
        """Until the output contains `text`. Raises JobError like `wait_event`."""
        while True:
            exited = self._exited(0)
            if text in self.output():
                return
            if exited:
                raise self._error(f"torchrun ended with exit code {self.wait()} without printing {text!r}")
            if time.monotonic() > self._end:
                raise self._error(f"{text!r} was not printed within {self.deadline:g} s")
            self._exited(_POLL_MS / 1000)

    def _exited(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    # ---- what it says

    def events(self) -> list[Event]:
        """All events written so far."""
        version = self._version()
        if version[0] == self._stale[0]:  # of an earlier job, this one has not made its own yet
            return []
        if version != self._seen[0]:
            self._seen = (version, list(event_log.read(self._events_path)))
        return self._seen[1]

    def _version(self) -> tuple[int, int]:
        """Inode and size of the file of events; zeros without one."""
        try:
            status = self._events_path.stat()
        except FileNotFoundError:
            return 0, 0
        return status.st_ino, status.st_size

    def recoveries(self) -> list[Event]:
        """All events `recovery` so far."""
        return [event for event in self.events() if event["event"] == "recovery"]

    def output(self) -> str:
        """What torchrun and its workers have printed so far, stdout and stderr together."""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")

    def digests(self) -> dict[int, Digest]:
        """By rank, from the lines `digest rank=R step=N sha256=HEX`; the last one of a rank counts."""
        return {int(rank): Digest(int(step), sha) for rank, step, sha in _DIGEST.findall(self.output())}

    def pid_of(self, rank: int) -> int:
        """The process that trains `rank` now, as far as the events tell. Raises JobError when they do not."""
        pid = shadow = None
        for event in self.events():
            if event["event"] == "recovery" and rank in _as_list(event.get("ranks", [event.get("rank")])):
                pids = event.get("pids")
                pid = pids.get(str(rank)) if isinstance(pids, dict) else shadow
            elif event.get("rank") != rank:
                continue
            elif event["event"] == "worker_started" and event.get("role") == "trainer":
                pid = event.get("pid")
            elif event["event"] == "shadow_ready":
                shadow = event.get("pid")
        if not isinstance(pid, int):
            raise self._error(f"no event tells the process of rank {rank}")
        return pid

    def _error(self, problem: str) -> JobError:
        tail = "\n".join(self.output().splitlines()[-60:])
        last = "\n".join(str(event) for event in self.events()[-15:])
        return JobError(f"{problem}\ncommand: {' '.join(self.command)}\nlast events:\n{last}\nlast output:\n{tail}")

    # ---- hurting it

    def kill(self, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a process of this job. Raises JobError when it is none (so that a wrong pid hits nobody)."""
        if pid not in dict(self.processes()):
            raise self._error(f"process {pid} is not part of the job, {number.name} was not sent")
        _signal(pid, number)

    def processes(self) -> list[tuple[int, str]]:
        """(pid, command line) of the job's live processes: of its session, or with its mark in their environment."""
        mark = f"{MARK}={self._mark}".encode()
        return [(pid, _command(pid)) for pid in _pids() if pid != os.getpid() and self._is_mine(pid, mark)]

    def _is_mine(self, pid: int, mark: bytes) -> bool:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return False
        state, _, _, session = stat.rpartition(")")[2].split()[:4]
        return state not in "ZX" and (int(session) == self.pid or mark in environ.split(b"\0"))

    def leftovers(self, within: float) -> list[tuple[int, str]]:
        """The job's processes that are still there after at most `within` seconds."""
        end = time.monotonic() + within
        while left := self.processes():
            for pid, _ in left:
                if not gone(pid, max(0.0, end - time.monotonic())):
                    return self.processes()
        return []


def resources(pid: int) -> Resources:
    """What a process holds now. Raises FileNotFoundError when it is gone."""
    status = Path(f"/proc/{pid}/status").read_text()
    values = dict(line.split(":", 1) for line in status.splitlines())
    return Resources(
        rss=int(values["VmRSS"].split()[0]) * 1024,
        fds=len(list(Path(f"/proc/{pid}/fd").iterdir())),
        threads=int(values["Threads"]),
    )


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


def _as_list(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else [value]
