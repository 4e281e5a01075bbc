"""The few calls of Linux that Python's standard library does not have."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CAP_SYS_NICE = 23

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def become_subreaper(enabled: bool = True) -> None:
    """Make (or stop making) this process the parent of its orphaned descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(enabled))


def die_with_parent(parent: int) -> None:
    """Have the kernel SIGKILL this process when its parent's main thread ends; end now if that has happened already.

    Args:
        parent: the pid that is expected to be the parent.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def may_lower_niceness() -> bool:
    """Whether this process may undo niceness of its own processes: CAP_SYS_NICE, or a limit that allows niceness 0."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NICE)
    if soft == resource.RLIM_INFINITY or soft >= 20:
        return True
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_NICE & 1)
    return False


def retitle(arguments: list[str]) -> None:
    """Show `arguments` as this process's command line in `ps` and `pgrep -f`, as far as there is room.

    Overwrites the memory that the kernel keeps the original arguments in; never beyond it, because the environment
    follows.
    """
    with open("/proc/self/stat", "rb") as file:  # noqa: PTH123  (proc file, one read)
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    room = end - start
    if start == 0 or room < 2:
        return
    text = b"\0".join(os.fsencode(argument) for argument in arguments)[: room - 1]
    ctypes.memmove(start, text.ljust(room, b"\0"), room)
