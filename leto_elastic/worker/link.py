"""The connection of a process to its agent, and the thread that listens on it.

The thread acts on what cannot wait for the main thread (`Abort`, `Stop`, the agent's death) and queues the rest. It
never touches the training state.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from leto_elastic import wire
from leto_elastic.errors import LetoError, NotEnoughMemory

ORPHAN_EXIT = 113
"""Exit code of a process whose agent is gone."""

M = TypeVar("M", bound=wire.Message)


class Delivery(NamedTuple):
    """A message and the descriptors that came with it (the receiver's to close)."""

    message: wire.FromAgent
    fds: list[int]


class Link:
    """One process's side of the connection.

    Args:
        path: of the agent's socket.
        token: from the environment.
        deadline: seconds for the agent's first answer; None to wait for as long as the agent is there.
    """

    def __init__(self, path: str, token: str, deadline: float | None) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(deadline)
        try:
            self._sock.connect(path)
            wire.send(self._sock, wire.Hello(token=token, pid=os.getpid()))
            message, fds = wire.receive_from_agent(self._sock)
        except (OSError, EOFError) as error:
            self._sock.close()
            within = "" if deadline is None else f" within {deadline:g} s"
            raise LetoError(
                f"the leto agent did not answer{within} at {path}: {error}; is torchrun still running?"
            ) from error
        if not isinstance(message, wire.Welcome):
            raise LetoError(f"the leto agent answered with {type(message).__name__} instead of Welcome")
        self._sock.settimeout(None)
        self.welcome = message
        self.welcome_fds = fds
        self._inbox: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self._kept: list[Delivery] = []
        self._send_lock = threading.Lock()
        self.on_abort: Callable[[int], None] = lambda _epoch: None
        self.holding = False  # the main thread waits with an exception of its own, by which to end if the agent is gone
        self._closing = False
        self._thread = threading.Thread(target=self._listen, name="leto-link", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def send(self, message: wire.Message, fds: list[int] | None = None) -> None:
        """Send one message. A process whose agent is gone ends here, unless it is `holding`."""
        try:
            with self._send_lock:
                wire.send(self._sock, message, fds)
        except OSError:
            if not self.holding:
                self._orphaned()

    def send_blob(self, make: Callable[[int], wire.Message], data: bytes, name: str) -> None:
        """Send bytes of any size: a memfd holding them, and the message that `make` returns for their size."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(data)
            self.send(make(len(data)), [fd])
        finally:
            os.close(fd)

    def alloc(self, name: str, size: int) -> int:
        """A descriptor of a new segment of the agent's. Raises NotEnoughMemory with the agent's reason."""
        self.send(wire.Alloc(name=name, size=size))
        delivery = self.wait((wire.Segment, wire.Refused), 60.0, f"segment {name} of {size} bytes")
        if isinstance(delivery.message, wire.Refused):
            raise NotEnoughMemory(delivery.message.reason)
        return delivery.fds[0]

    def wait(self, kinds: tuple[type[wire.Message], ...], deadline: float | None, what: str) -> Delivery:
        """The next message of one of these kinds; others stay for later. Raises LetoError after `deadline` seconds."""
        for index, kept in enumerate(self._kept):
            if isinstance(kept.message, kinds):
                return self._kept.pop(index)
        end = None if deadline is None else time.monotonic() + deadline
        while True:
            try:
                delivery = self._inbox.get(timeout=None if end is None else max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise LetoError(
                    f"waited {deadline:g} s for the leto agent: {what}; see its log on torchrun's terminal"
                ) from None
            if isinstance(delivery.message, kinds):
                return delivery
            self._kept.append(delivery)

    def close(self) -> None:
        """Stop listening; the agent sees the end of the connection."""
        self._closing = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._thread.join()
        self._sock.close()

    def _listen(self) -> None:
        while True:
            try:
                message, fds = wire.receive_from_agent(self._sock)
            except (OSError, EOFError):
                if self.holding:
                    self._inbox.put(Delivery(wire.Surrender(), []))
                elif not self._closing:
                    self._orphaned()
                return
            if isinstance(message, wire.Abort):
                self.on_abort(message.epoch)
            elif isinstance(message, wire.Stop):
                os._exit(ORPHAN_EXIT)
            else:
                self._inbox.put(Delivery(message, fds))

    @staticmethod
    def _orphaned() -> None:
        sys.stderr.flush()
        os._exit(ORPHAN_EXIT)


def read_blob(fd: int, size: int) -> bytes:
    """The content of a memfd that came with a message; closes it."""
    with open(fd, "rb") as file:
        data = os.pread(file.fileno(), size, 0)
    if len(data) != size:
        raise LetoError(f"a message announced {size} bytes, {len(data)} came")
    return data
