"""What a process does at the moment, from outside: the Python stacks of its threads, written by itself on a signal.

`faulthandler` writes them in the signal handler, in C, so also when no thread can run Python. A process that is stopped
cannot; of that the kernel tells a little.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
from pathlib import Path
from typing import TextIO

STACKS_SIGNAL = signal.SIGRTMIN + 7
"""A trainer that gets it writes its stacks. A real-time signal that neither torch nor Python itself uses."""


def file_of(run_dir: str, rank: int, pid: int) -> Path:
    """Where the stacks of a trainer go: `<run_dir>/stacks/rank<R>.pid<P>.txt`."""
    return Path(run_dir) / "stacks" / f"rank{rank}.pid{pid}.txt"


def answer(path: Path) -> None:
    """From now on, append this process's stacks to a file on `STACKS_SIGNAL`; an empty one is removed at its exit.

    When the file cannot be made the signal is ignored, since that must not end a training run.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError:
        signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
        return
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)
    atexit.register(_stop, file, os.getpid())


def _stop(file: TextIO, owner: int) -> None:
    if os.getpid() != owner:  # forked from it
        return
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        if os.fstat(file.fileno()).st_size == 0:
            Path(file.name).unlink()


def of_kernel(pid: int) -> str:
    """What the kernel tells of the threads of a process: state, where they sleep, and (to root) their kernel stacks."""
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*"), key=lambda path: int(path.name)):
        name, state = _read(task / "comm"), _read(task / "stat").rpartition(") ")[2][:1]
        lines.append(f"thread {task.name} ({name}), state {state or '?'}, sleeps in {_read(task / 'wchan') or '?'}")
        lines += [f"  {line}" for line in _read(task / "stack").splitlines()]
    return "\n".join(lines)


def state_of(pid: int) -> str:
    """The state of a process as `ps` shows it, such as S, R, D or T; "" when it is gone."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(") ")[2][:1]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
