"""The agent's end of the zygote: starts it, asks it for processes, and starts it again when it dies."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Literal

from leto_elastic.errors import LetoError
from leto_elastic.launch.forking import READY, Start, receive_started, send_start
from leto_elastic.launch.zygote import BOOT, IMPORTS, PADDING

_ATTEMPTS = 3


class Forker:
    """Starts processes by way of a zygote.

    Args:
        deadline: seconds for the zygote's imports.
        imports: modules that it imports before it forks anything.
    """

    def __init__(self, deadline: float, imports: Sequence[str] = IMPORTS) -> None:
        self._deadline = deadline
        self._imports = ",".join(imports)
        self._numbers = READY
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._lock = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start the zygote and wait until it has imported everything. Raises LetoError when it cannot."""
        async with self._lock:
            if self._sock is not None:
                return
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-u", "-c", BOOT, str(theirs.fileno()), self._imports, " " * PADDING],
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    stdout=2,
                )
            ours.setblocking(False)
            self._sock = ours
            loop = asyncio.get_running_loop()
            loop.add_reader(ours, self._readable)
            ready = self._waiting[READY] = loop.create_future()
            try:
                await asyncio.wait_for(ready, self._deadline)
            except TimeoutError:
                await self.close()
                raise LetoError(
                    f"the process that imports torch for the workers was not done within {self._deadline:g} s "
                    "(deadlines.start)"
                ) from None
            except EOFError:
                raise LetoError(
                    "the process that imports torch for the workers ended while importing; see its traceback above"
                ) from None

    async def fork(
        self,
        kind: Literal["script", "module", "exec"],
        argv: list[str],
        env: dict[str, str],
        *,
        nice: int,
        stdout: int,
        stderr: int,
        tripwire: int,
    ) -> int:
        """Start a process as a child of this one; its pid. Raises LetoError when no zygote can be had."""
        for _ in range(_ATTEMPTS):
            await self.start()
            assert self._sock is not None
            self._numbers += 1
            future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self._waiting[self._numbers] = future
            start = Start(self._numbers, kind, argv, env, os.getcwd(), nice)  # noqa: PTH109
            try:
                send_start(self._sock, start, stdout, stderr, tripwire)
                return await future
            except (EOFError, OSError):
                self._waiting.pop(start.number, None)
                self._lost()
        raise LetoError(f"the process that forks the workers died {_ATTEMPTS} times in a row")

    async def close(self) -> None:
        """End the zygote."""
        self._lost()

    def _readable(self) -> None:
        assert self._sock is not None
        try:
            started = receive_started(self._sock)
        except BlockingIOError:
            return
        except (EOFError, ConnectionResetError):
            self._lost()
            return
        future = self._waiting.pop(started.number, None)
        if future is None or future.done():
            return
        if started.error:
            future.set_exception(LetoError(started.error))
        else:
            future.set_result(started.pid)

    def _lost(self) -> None:
        if self._sock is not None:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._sock.close()
            self._sock = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(EOFError())
