"""Which SIGKILL was the kernel's, for want of memory.

The kernel counts the processes that it kills for memory per control group: `oom_kill` in `memory.events` (v2) or in
`memory.oom_control` (v1), always in the group of the *victim*, whichever limit was reached. It raises the counter
before it sends the signal, so whoever sees the end of a process also sees it counted: a look at the counter when the
end is noticed cannot come too early, and no wait is needed.

It may come too late: another process of the group (a data loader, a shadow) may have been counted, and nobody of ours
has ended by it. So a rise that was seen explains the ends noticed within `WINDOW` seconds after that, one each.
What remains uncertain: when of two processes of one group, killed in the same moment, only one was killed for memory,
the one noticed first is taken for it.

A group that holds everything (the root of v2) counts nothing; there, such a SIGKILL is a signal like any other.

Rejected: the kernel's log, which names the victim, but is not to be read in most containers; `oom_group_kill`, since
each victim of it is counted in `oom_kill` too.
"""

from __future__ import annotations

import signal
from collections import deque
from pathlib import Path

from leto_elastic.launch.segments import MIB, Memory

WINDOW = 30.0
"""Seconds that a counted kill may be older than the end that it explains: a large process is torn down slowly."""

_LOADER = "is killed by signal: Killed"  # as torch's DataLoader says it of its worker

_FILES = ("memory.events", "memory.oom_control")


class OomWatch:
    """The counters of the control groups of an agent's processes.

    Args:
        memory: knows where the control groups are.
        proc: where procfs is mounted.
    """

    def __init__(self, memory: Memory, proc: Path = Path("/proc")) -> None:
        self._memory = memory
        self._proc = proc
        self._groups: dict[int, Path] = {}  # by pid: the file that counts it
        self._counts: dict[Path, int] = {}
        self._unexplained: dict[Path, deque[float]] = {}  # when the kills were seen that no end has been noticed of
        self._own: dict[int, int] = {}  # by pid: bytes of its own when last looked at

    def joined(self, pid: int) -> None:
        """A process runs, or may be in another group now. Must be told before it ends."""
        file = next((file for file in self._candidates(pid) if _count(file) is not None), None)
        if file is None:
            self._groups.pop(pid, None)
            return
        self._groups[pid] = file
        self._counts.setdefault(file, _count(file) or 0)
        self._unexplained.setdefault(file, deque())

    def look(self, now: float) -> None:
        """Read the counters and what each process has; once in a while, `now` in monotonic seconds."""
        for file in set(self._groups.values()):
            self._read(file, now)
        for pid in self._groups:
            self._own[pid] = self._anonymous(pid) or self._own.get(pid, 0)

    def ended(self, pid: int, code: int, now: float, failing: str | None = None) -> str | None:
        """A process ended: a sentence with the numbers when it was killed for memory, else None.

        Args:
            pid: of the process; it is forgotten.
            code: exit code, or minus the signal's number.
            now: when that was noticed, or later; monotonic seconds.
            failing: the exception that it ended by. One that tells that a data loader was killed counts as its end.
        """
        file, own = self._groups.pop(pid, None), self._own.pop(pid, 0)
        loader = code >= 0 and failing is not None and _LOADER in failing
        if file is None or not (code == -signal.SIGKILL or loader):
            return None
        self._read(file, now)
        kills = self._unexplained[file]
        if not kills:
            return None
        kills.popleft()
        numbers = self._memory.told(file.parent)
        if own:
            numbers += f"; the process had {own / MIB:.0f} MiB of its own when last looked at"
        who = "a data loader of it was killed" if loader else "killed"
        return f"{who} by the kernel for want of memory: {numbers}"

    def _read(self, file: Path, now: float) -> None:
        count, kills = _count(file), self._unexplained[file]
        while kills and now - kills[0] > WINDOW:
            kills.popleft()
        if count is not None:
            kills.extend([now] * (count - self._counts[file]))
            self._counts[file] = count

    def _candidates(self, pid: int) -> list[Path]:
        return [path / name for path in self._memory.groups(str(pid)) for name in _FILES]

    def _anonymous(self, pid: int) -> int | None:
        try:
            lines = (self._proc / str(pid) / "status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), None)


def _count(file: Path) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == ["oom_kill"]), None)
