"""The agent's side of its connections to local processes.

The listener lives in a directory that only its owner may enter. A process is known by the token in its environment, not
by its pid: a wrapper script may stand between. A message that cannot be sent at once is queued, so a stopped process
never blocks the agent; the queue is bounded, because nothing is ever sent in a stream.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from leto_elastic import wire
from leto_elastic.errors import LetoError

_QUEUE = 64

_LONGEST = 80  # of a temporary directory; the address of a socket has 107 bytes


class Link:
    """A connection to one process that has said Hello.

    Args:
        sock: non-blocking.
        on_message: called for each message with its descriptors, which then belong to the callee.
        on_end: called once at end of file, or with the reason for which the connection was given up.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_message: Callable[[wire.FromWorker, list[int]], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._sock = sock
        self._on_message = on_message
        self._on_end = on_end
        self._queue: deque[tuple[wire.FromAgent, list[int]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._loop.add_reader(sock, self._readable)

    def send(self, message: wire.FromAgent, fds: list[int] | None = None) -> None:
        """Send now, or as soon as there is room. A connection that is gone is no error: the process's exit tells."""
        if not self._open or (not self._queue and self._try(message, fds or [])):
            return
        if len(self._queue) >= _QUEUE:
            self._end("it does not read its messages")
            return
        self._queue.append((message, [os.dup(fd) for fd in fds or []]))
        self._loop.add_writer(self._sock, self._writable)

    def close(self) -> None:
        """Close, without calling `on_end`."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()
            for _, fds in self._queue:
                _close_all(fds)
            self._queue.clear()

    def _try(self, message: wire.FromAgent, fds: list[int]) -> bool:
        try:
            wire.send(self._sock, message, fds)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            self._end("closed")
        return True

    def _writable(self) -> None:
        while self._queue and self._open:
            message, fds = self._queue[0]
            if not self._try(message, fds):
                return
            if self._open:
                self._queue.popleft()
                _close_all(fds)
        if self._open:
            self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        try:
            message, fds = wire.receive_from_worker(self._sock)
        except BlockingIOError:
            return
        except (EOFError, ConnectionResetError):
            self._end("closed")
            return
        except (LetoError, msgspec.ValidationError, msgspec.DecodeError) as error:
            self._end(f"it sent a message that cannot be read: {error}")
            return
        self._on_message(message, fds)

    def _end(self, reason: str) -> None:
        self.close()
        self._on_end(reason)


class Listener:
    """Accepts connections and hands over those whose first message carries a token that is expected.

    Args:
        welcome: called with token, socket and Hello; returns False to refuse.
    """

    def __init__(self, welcome: Callable[[wire.Hello, socket.socket], bool]) -> None:
        self._welcome = welcome
        self._loop = asyncio.get_running_loop()
        short = len(tempfile.gettempdir()) <= _LONGEST
        self._directory = tempfile.mkdtemp(prefix="leto-", dir=None if short else "/tmp")  # noqa: S108  (0700)
        self.path = str(Path(self._directory, "agent"))
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._sock.bind(self.path)
        self._sock.listen(128)
        self._strangers: set[socket.socket] = set()
        self._loop.add_reader(self._sock, self._acceptable)

    def close(self) -> None:
        self._loop.remove_reader(self._sock)
        self._sock.close()
        for stranger in list(self._strangers):
            self._forget(stranger)
            stranger.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _acceptable(self) -> None:
        try:
            stranger, _ = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        stranger.setblocking(False)
        self._strangers.add(stranger)
        self._loop.add_reader(stranger, self._introduced, stranger)

    def _introduced(self, stranger: socket.socket) -> None:
        try:
            message, fds = wire.receive_from_worker(stranger)
        except BlockingIOError:
            return
        except (EOFError, OSError, LetoError, msgspec.ValidationError, msgspec.DecodeError):
            self._forget(stranger)
            stranger.close()
            return
        _close_all(fds)
        self._forget(stranger)
        if not isinstance(message, wire.Hello) or not self._welcome(message, stranger):
            stranger.close()

    def _forget(self, stranger: socket.socket) -> None:
        self._strangers.discard(stranger)
        self._loop.remove_reader(stranger)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
