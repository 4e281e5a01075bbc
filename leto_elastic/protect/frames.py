"""Frames over TCP: typed header, raw payload, checksums over all of it.

    magic  kind  header length  payload length  header CRC  payload CRC  CRC of these six   header (msgpack)   payload

What is guaranteed to a receiver: no length is believed before the checksum of the fixed part matches, nothing is
allocated beyond `HEADER_MAX` and what `PAYLOADS` allows for that message, nothing is unpickled, and a payload is handed
over only when its CRC-32 matches. Any violation is a ProtocolError, after which a connection must be closed: it is not
known where the next frame starts.

What is not: after the handshake frames carry no MAC. A CRC finds damage, not intent; whoever can write into an
established connection can forge frames, and whoever can read it sees the state. Keepers need a network that is trusted
that far, as gloo and NCCL do. A MAC over each payload would cost more than the code itself (HMAC-SHA256: about 1 GB/s
of a core, ISA-L: 10). Rejected too: gloo between keepers (no abort, no authentication, a rendezvous of its own), and
ZeroMQ (a dependency with threads of its own that copies and hides the end of a connection, which is what tells us
that a node died).
"""

from __future__ import annotations

import socket
import struct
import time
import zlib
from typing import Any

import msgspec
import numpy as np

from leto_elastic.errors import LetoError
from leto_elastic.protect.buffers import Bytes
from leto_elastic.protect.checksum import checksum
from leto_elastic.protect.messages import PAYLOADS, Admitted, Answer, Challenge, Greeting, Message, Proof, Request

MAGIC = b"LtK1"
HEADER_MAX = 4096  # bytes

_FIXED = struct.Struct("<4sBxHIII")
_SEAL = struct.Struct("<I")
PREFIX_BYTES = _FIXED.size + _SEAL.size

HANDSHAKE, REQUEST, ANSWER = range(3)

_encode = msgspec.msgpack.Encoder().encode
_EMPTY: Bytes = np.empty(0, dtype=np.uint8)


class ProtocolError(LetoError):
    """What came is not what a keeper sends; the connection must be closed."""


class Closed(LetoError):
    """The other side closed the connection between two frames."""


class Expected:
    """What may come next: the kind of frame and its decoder."""

    def __init__(self, kind: int, types: Any) -> None:
        self.kind = kind
        self.decoder = msgspec.msgpack.Decoder(types)


GREETING, CHALLENGE, PROOF, ADMITTED = (Expected(HANDSHAKE, t) for t in (Greeting, Challenge, Proof, Admitted))
REQUESTS, ANSWERS = Expected(REQUEST, Request), Expected(ANSWER, Answer)


class Connection:
    """A connected stream socket, which it owns. One thread may send while another receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._deadline: float | None = None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def connect(self, name: Any, seconds: float) -> None:
        """Connect to a resolved address. Raises OSError (TimeoutError: there was no answer in time)."""
        self._sock.settimeout(seconds)
        self._sock.connect(name)

    def within(self, seconds: float | None) -> None:
        """From now on all that is sent and received, together, must be over in this time; None: no limit."""
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._sock.settimeout(seconds)

    def silence(self, seconds: float) -> None:
        """From now on no single wait for the other side may last longer than this."""
        self._deadline = None
        self._sock.settimeout(seconds)

    def send(self, kind: int, message: Message, payload: Bytes | bytes = b"", crc: int | None = None) -> None:
        """Send one frame.

        Args:
            kind: HANDSHAKE, REQUEST or ANSWER.
            message: its header.
            payload: contiguous bytes; not copied.
            crc: the CRC-32 of the payload, when it is known.

        Raises:
            OSError: the connection is gone, or (TimeoutError) the deadline passed.
            ProtocolError: larger than a receiver would take.
        """
        header = _encode(message)
        view = payload.data if isinstance(payload, np.ndarray) else memoryview(payload)
        if len(header) > HEADER_MAX or view.nbytes > PAYLOADS.get(type(message), 0):
            raise ProtocolError(f"{type(message).__name__} of {len(header)} + {view.nbytes} bytes is too large")
        total = checksum(payload) if crc is None else crc
        fixed = _FIXED.pack(MAGIC, kind, len(header), view.nbytes, zlib.crc32(header), total)
        head = fixed + _SEAL.pack(zlib.crc32(fixed)) + header
        self._wait()
        if not view.nbytes:
            self._sock.sendall(head)
            return
        sent = self._sock.sendmsg([head, view])
        if sent < len(head):
            self._sock.sendall(head[sent:])
            sent = len(head)
        self._sock.sendall(view[sent - len(head) :])

    def receive(self, expected: Expected, into: Bytes | None = None) -> tuple[Any, Bytes]:
        """Receive one frame.

        Args:
            expected: what may come.
            into: where a payload goes that fits, (n,) uint8; larger ones get memory of their own.

        Returns:
            The message and its payload, which `into` may hold.

        Raises:
            Closed: nothing came, because the other side closed the connection.
            ProtocolError: something else than expected came, or half a frame.
            OSError: the connection is gone, or (TimeoutError) the deadline passed.
        """
        prefix = bytearray(PREFIX_BYTES)
        self._fill(memoryview(prefix), first=True)
        magic, kind, header_bytes, payload_bytes, header_crc, payload_crc = _FIXED.unpack_from(prefix)
        if magic != MAGIC:
            raise ProtocolError("not a frame of a keeper")
        if zlib.crc32(prefix[: _FIXED.size]) != _SEAL.unpack_from(prefix, _FIXED.size)[0]:
            raise ProtocolError("a frame's prefix does not match its checksum")
        if kind != expected.kind:
            raise ProtocolError(f"a frame of kind {kind} instead of {expected.kind}")
        if header_bytes > HEADER_MAX:
            raise ProtocolError(f"a header of {header_bytes} bytes, more than {HEADER_MAX}")
        header = bytearray(header_bytes)
        self._fill(memoryview(header))
        if zlib.crc32(header) != header_crc:
            raise ProtocolError("a frame's header does not match its checksum")
        try:
            message = expected.decoder.decode(header)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"a header that cannot be read: {error}") from error
        most = PAYLOADS.get(type(message), 0)
        if payload_bytes > most:
            raise ProtocolError(f"{type(message).__name__} with {payload_bytes} bytes, more than {most}")
        if not payload_bytes:
            return message, _EMPTY
        fits = into is not None and payload_bytes <= into.size
        payload = into[:payload_bytes] if into is not None and fits else np.empty(payload_bytes, dtype=np.uint8)
        self._fill(payload.data)
        if checksum(payload) != payload_crc:
            raise ProtocolError(f"the payload of {type(message).__name__} does not match its checksum")
        return message, payload

    def interrupt(self) -> None:
        """Wake whoever sends or receives, from any thread; the connection is of no more use."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # never connected, or gone
            pass

    def close(self) -> None:
        """Close. Only for the thread that receives, or when there is none."""
        self._sock.close()

    def _wait(self) -> None:
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the deadline passed")
            self._sock.settimeout(left)

    def _fill(self, view: memoryview, *, first: bool = False) -> None:
        got, size = 0, len(view)
        while got < size:
            self._wait()
            count = self._sock.recv_into(view[got:], 0, socket.MSG_WAITALL)
            if not count:
                if first and not got:
                    raise Closed("closed by the other side")
                raise ProtocolError("a frame ends in its middle")
            got += count
