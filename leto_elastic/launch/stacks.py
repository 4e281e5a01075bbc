"""Saves what a trainer that hangs was doing, before it is killed; never for long, and without blocking the agent."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import shutil
from pathlib import Path

from leto_elastic.observe.stacks import STACKS_SIGNAL, of_kernel, state_of

_ANSWER = 0.2
"""Seconds that a process has to write its stacks."""

_LOOK = 0.005
"""Seconds between two looks at what it has written."""

_DEBUGGER = 1.0
"""Seconds that py-spy has, where it is installed, for a process that did not answer."""

_libc = ctypes.CDLL(None)


async def save(pid: int, thread: int, path: Path, title: str) -> None:
    """Append a title and the stacks of process `pid` to a file.

    `thread`: one of its, to be interrupted by the signal. Nothing is raised: a disk that is full or a process that is
    gone leaves less in the file.
    """
    _append(path, f"{title}\n")
    before = _size(path)
    if state_of(pid) not in ("", "T", "t", "D", "Z", "X") and thread:
        _libc.tgkill(pid, thread, int(STACKS_SIGNAL))
        if await _answered(path, before):
            return
    _append(path, f"no answer from the process; the kernel says:\n{of_kernel(pid)}\n")
    if (spy := shutil.which("py-spy")) is not None:
        _append(path, await _debugger(spy, pid))


async def _answered(path: Path, before: int) -> bool:
    loop = asyncio.get_running_loop()
    end = loop.time() + _ANSWER
    size = before
    while loop.time() < end:
        await asyncio.sleep(_LOOK)
        now = _size(path)
        if now > before and now == size:  # it has written, and writes no more
            return True
        size = now
    return size > before


async def _debugger(spy: str, pid: int) -> str:
    process = await asyncio.create_subprocess_exec(
        spy, "dump", "--nonblocking", "--pid", str(pid),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        told, _ = await asyncio.wait_for(process.communicate(), _DEBUGGER)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return f"py-spy did not end within {_DEBUGGER:g} s\n"
    return told.decode(errors="replace")


def _append(path: Path, text: str) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
