"""This process's TCP sockets, seen through /proc/self/fd.

gloo gives no handle on its sockets, so they are recognised by their addresses: a gloo connection has the listening
address of this process's device at its own end, or that of a peer's device at the other. Descriptors are duplicated
before they are looked at, so a number that is closed and reused meanwhile can never make an innocent socket the target.

Rejected: comparing the set of descriptors before and after a group is built. Another thread of the user's program may
open a connection in between, and sockets opened by a construction that is still under way would be missed.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple


class Address(NamedTuple):
    """An IP address and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """The inverse of `str()`."""
        host, _, port = text.rpartition(":")
        return cls(host, int(port))


class TcpSocket(NamedTuple):
    """A duplicate of one of this process's TCP sockets. `peer` is None for a listening or unconnected one."""

    fd: int
    sock: socket.socket
    local: Address
    peer: Address | None
    listening: bool


Connection = tuple[Address, Address | None]
"""Its own end and its peer's, None once it is not connected any more."""


def _address(name: tuple[Any, ...]) -> Address:
    """IPv4 addresses look the same on a socket of either family (torch's store client uses IPv6 ones)."""
    return Address(str(name[0]).removeprefix("::ffff:"), int(name[1]))


def _inspect(fd: int) -> TcpSocket | None:
    try:
        copy = os.dup(fd)
    except OSError:
        return None
    try:
        if not stat.S_ISSOCK(os.fstat(copy).st_mode):
            os.close(copy)
            return None
        sock = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        sock.close()
        return None
    try:
        local = _address(sock.getsockname())
        listening = bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        sock.close()
        return None
    try:
        peer = _address(sock.getpeername())
    except OSError:
        peer = None
    return TcpSocket(fd, sock, local, peer, listening)


def tcp_sockets() -> Iterator[TcpSocket]:
    """Each TCP socket of this process; the duplicate is closed when the iteration goes on."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - of an abort every microsecond counts
        found = _inspect(int(name))
        if found is not None:
            with found.sock:
                yield found


def listening() -> dict[int, Address]:
    """The listening TCP sockets of this process by descriptor."""
    return {found.fd: found.local for found in tcp_sockets() if found.listening}


def connected_to(host: str, port: int) -> set[Address]:
    """The own ends of this process's TCP connections to a server."""
    servers = {_address(info[4]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    return {found.local for found in tcp_sockets() if found.peer in servers}


def _connections(local: Collection[Address], peers: Collection[Address]) -> Iterator[TcpSocket]:
    return (found for found in tcp_sockets() if not found.listening and (found.local in local or found.peer in peers))


def shut_down(local: Collection[Address], peers: Collection[Address]) -> int:
    """End every TCP connection from one of the addresses `local` or to one of `peers`; returns how many there were.

    Whoever is blocked in a read or write on one, in whichever thread, returns at once. Listening sockets are spared
    (gloo ends the process when its listener fails). A handshake under way counts as a connection.
    """
    ended = 0
    for found in _connections(local, peers):
        try:
            found.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # already ended
        ended += 1
    return ended


def end_reading(local: Collection[Address], peers: Collection[Address], held: dict[Connection, socket.socket]) -> int:
    """End such connections for reading only, and keep a duplicate of each in `held`.

    As long as it is there the other side is told nothing, even if the owner has closed its own, and whatever is written
    on either side gets as far as before. Returns how many of them their owner has not closed yet.
    """
    duplicates = {sock.fileno() for sock in held.values()}
    left = 0
    for found in _connections(local, peers):
        if found.fd in duplicates:
            continue
        try:
            found.sock.shutdown(socket.SHUT_RD)
        except OSError:
            continue  # already ended
        left += 1
        if (found.local, found.peer) not in held:
            held[found.local, found.peer] = found.sock.dup()
    return left


def knock(address: Address, numbers: range) -> None:
    """Claim to be the peers that gloo's listener at `address` still waits for, by the numbers it gave their pairs.

    A pair whose other side is to connect waits on no socket, so nothing can be shut down to wake it. It goes on when a
    connection arrives that starts with its number (gloo's `sequence_number_t`); ours ends right after, as a dead
    peer's would.
    """
    for number in numbers:
        try:
            with socket.create_connection(address, timeout=1.0) as sock:
                sock.sendall(struct.pack("=q", number))
        except OSError:
            return  # the listener is gone: nobody waits
