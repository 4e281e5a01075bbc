"""What an agent and its zygote say to each other: the request to start a process, and the answer.

One `SOCK_SEQPACKET` pair. A request may hold a large environment, so it lies in a memfd; its descriptor, those of the
new process's stdout and stderr, and that of its tripwire come along.
"""

from __future__ import annotations

import os
import socket
from typing import Literal

import msgspec

from leto_elastic.errors import LetoError

READY = 0
"""Number of the answer that a zygote gives unasked, once its imports are done."""


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One process to start.

    `script` and `module` run in the forked interpreter as `python -u argv[0] ...` and `python -u -m argv[0] ...` would;
    `exec` replaces it by the program argv[0].
    """

    number: int
    kind: Literal["script", "module", "exec"]
    argv: list[str]
    env: dict[str, str]
    cwd: str
    nice: int


class Started(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer: `pid` of the new process, or 0 and the `error`."""

    number: int
    pid: int
    error: str = ""


_FDS = 4

_encoder = msgspec.msgpack.Encoder()
_start = msgspec.msgpack.Decoder(Start)
_started = msgspec.msgpack.Decoder(Started)


def send_start(sock: socket.socket, start: Start, stdout: int, stderr: int, tripwire: int) -> None:
    """Ask a zygote for a process. Raises OSError when it is gone."""
    memory = os.memfd_create("leto-start", os.MFD_CLOEXEC)
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(_encoder.encode(start))
        socket.send_fds(sock, [b"start"], [memory, stdout, stderr, tripwire])
    finally:
        os.close(memory)


def receive_start(sock: socket.socket) -> tuple[Start, int, int, int]:
    """The next request, stdout, stderr and tripwire. Raises EOFError when the agent is gone."""
    data, fds, _, _ = socket.recv_fds(sock, 64, _FDS, socket.MSG_CMSG_CLOEXEC)
    if not data:
        raise EOFError
    if len(fds) != _FDS:
        raise LetoError(f"a request to start a process came with {len(fds)} descriptors instead of {_FDS}")
    memory, stdout, stderr, tripwire = fds
    with open(memory, "rb") as file:  # noqa: PTH123  (a descriptor)
        file.seek(0)
        start = _start.decode(file.read())
    return start, stdout, stderr, tripwire


def send_started(sock: socket.socket, started: Started) -> None:
    """Answer a request."""
    sock.send(_encoder.encode(started))


def receive_started(sock: socket.socket) -> Started:
    """The next answer. Raises EOFError when the zygote is gone, BlockingIOError when there is none yet."""
    data = sock.recv(65536)
    if not data:
        raise EOFError
    return _started.decode(data)
