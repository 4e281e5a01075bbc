"""Seeing a death before the kernel has finished it.

A pidfd (and a connection's end of file) tells of a death only when the dead process's memory is torn down: 20 to 60 ms
for a process with torch in it, measured on two cores. But one of the first things that the kernel does for a dying
thread is to walk its list of robust futexes, and to wake whoever waits for them. So a worker's main thread holds a
robust mutex in a shared page for as long as it lives, and a thread of the agent waits for it: 0.5 to 2 ms.

What a trip means: the main thread is exiting, or calls `exec` (which is told apart by the thread's flags). What it does
not mean by itself: that no other thread of the process runs any more. `last_breath` answers that, from the flags of all
threads: a thread that is exiting never runs the process's code again, so nothing writes into its segments. The exit is
reaped by pidfd as ever.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

_PAGE = 4096
_MUTEX_BYTES = 64  # pthread_mutex_t has 40 to 48
_SHARED = _ROBUST = 1
_PF_EXITING = 0x4

_libc = ctypes.CDLL(None)

_held: list[mmap.mmap] = []
"""Pages whose mutex this process holds: to be mapped until its end."""


def _mutex(page: mmap.mmap) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * _MUTEX_BYTES).from_buffer(page)


def make() -> int:
    """A descriptor of a page with an unlocked mutex in it; the caller's to close. Raises OSError."""
    fd = os.memfd_create("leto-tripwire", os.MFD_CLOEXEC)
    os.ftruncate(fd, _PAGE)
    with mmap.mmap(fd, _PAGE) as page:
        attributes = ctypes.create_string_buffer(64)
        mutex = _mutex(page)
        failed = (
            _libc.pthread_mutexattr_init(attributes)
            or _libc.pthread_mutexattr_setpshared(attributes, _SHARED)
            or _libc.pthread_mutexattr_setrobust(attributes, _ROBUST)
            or _libc.pthread_mutex_init(mutex, attributes)
        )
        del mutex
    if failed:
        os.close(fd)
        raise OSError(failed, f"robust mutex: {os.strerror(failed)}")
    return fd


def arm(fd: int) -> None:
    """In a worker's main thread: hold the mutex until the end. Closes the descriptor."""
    page = mmap.mmap(fd, _PAGE)
    os.close(fd)
    _libc.pthread_mutex_lock(_mutex(page))
    _held.append(page)


def watch(fd: int, tripped: Callable[[], None]) -> None:
    """Have `tripped` called, in a thread of its own, when the worker that armed it dies or execs.

    Args:
        fd: as from `make`, armed by now; may be closed afterwards.
        tripped: must not raise.
    """
    page = mmap.mmap(fd, _PAGE)

    def wait() -> None:
        mutex = _mutex(page)
        owner_died = _libc.pthread_mutex_lock(mutex) == errno.EOWNERDEAD
        if owner_died:
            tripped()
            _libc.pthread_mutex_consistent(mutex)
        _libc.pthread_mutex_unlock(mutex)
        del mutex
        page.close()

    threading.Thread(target=wait, name="leto-tripwire", daemon=True).start()


def last_breath(pid: int, proc: Path = Path("/proc")) -> int | None:
    """The exit code of a child that no thread of runs any more, negative for a signal; None: not yet, or not dying.

    An exit code of 0 is never told: there is no hurry then, and it also stands for "not allowed to know".
    """
    status = 0
    try:
        threads = list((proc / str(pid) / "task").iterdir())
        for thread in threads:
            try:
                fields = (thread / "stat").read_bytes().rpartition(b")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if not int(fields[6]) & _PF_EXITING:
                return None
            if thread.name == str(pid):
                status = int(fields[49])
    except (FileNotFoundError, ProcessLookupError):
        return None
    return os.waitstatus_to_exitcode(status & ~0x80) or None
