"""Streams of bytes from where a piece of a stripe lies, chunk by chunk, ahead of whoever decodes them.

Every one yields chunks of exactly the asked size; what is shorter than that is zero-padded, as it is in the code.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np

from leto_elastic.protect.buffers import Bytes
from leto_elastic.protect.checksum import checksum
from leto_elastic.protect.frames import ANSWERS, REQUEST, Closed, Connection, ProtocolError
from leto_elastic.protect.handshake import Identity
from leto_elastic.protect.mapped import Stream
from leto_elastic.protect.messages import CHUNK, Copy, Data, End, Fetch, ReadPiece, ReadUnit, Refused
from leto_elastic.protect.peer import dial
from leto_elastic.protect.world import Disconnected, PeerAddress, Refusal, Silent

AHEAD = 4  # chunks received and not yet decoded, of one piece

Chunks = Iterator[Bytes]


def chunk_sizes(length: int) -> Iterator[tuple[int, int]]:
    """Offsets and sizes of the chunks of so many bytes."""
    for offset in range(0, length, CHUNK):
        yield offset, min(CHUNK, length - offset)


def from_memory(source: Stream, start: int, stop: int, length: int) -> Chunks:
    """The bytes from start to stop of what is here, padded to `length`."""
    buffer = np.zeros(min(CHUNK, length), dtype=np.uint8)
    for offset, size in chunk_sizes(length):
        data = buffer[:size]
        have = max(0, min(size, stop - start - offset))
        if have:
            source.read(start + offset, data[:have])
        data[have:] = 0
        yield data


@contextmanager
def from_peer(
    address: PeerAddress, me: Identity, request: ReadPiece | ReadUnit, length: int, silence: float
) -> Iterator[Chunks]:
    """What a peer sends for a request, padded to `length`, received by a thread of its own.

    Raises, at the chunk where it becomes known, Refusal, or Disconnected: it broke, or was silent for `silence` s.
    """
    reader = _Reader(address, me, request, length, silence)
    try:
        yield reader.chunks()
    finally:
        reader.stop()


def fetch(address: PeerAddress, me: Identity, request: Fetch, silence: float) -> bytes:
    """A small copy that a peer has. Raises Refusal or Disconnected."""
    try:
        connection = dial(address, me)
        try:
            connection.silence(silence)
            connection.send(REQUEST, request)
            answer, payload = connection.receive(ANSWERS)
        finally:
            connection.close()
    except TimeoutError as error:
        raise Silent(f"node {address.node} was silent for {silence:.0f} s") from error
    except (Closed, ProtocolError, OSError) as error:
        raise Disconnected(f"node {address.node}: {error or type(error).__name__}") from error
    if isinstance(answer, Refused):
        raise Refusal(f"node {address.node}: {answer.reason}")
    if not isinstance(answer, Copy):
        raise Disconnected(f"node {address.node} answered {type(answer).__name__}")
    return bytes(payload)


class _Reader:
    def __init__(
        self, address: PeerAddress, me: Identity, request: ReadPiece | ReadUnit, length: int, silence: float
    ) -> None:
        self._address = address
        self._me = me
        self._request = request
        self._length = length
        self._silence = silence
        self._full: queue.SimpleQueue[Bytes | Refusal | Disconnected] = queue.SimpleQueue()
        self._empty: queue.SimpleQueue[Bytes | None] = queue.SimpleQueue()
        for _ in range(AHEAD):
            self._empty.put(np.empty(min(CHUNK, length), dtype=np.uint8))
        self._connection: Connection | None = None
        self._stopped = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"leto-read-{address.node}", daemon=True)
        self._thread.start()

    def chunks(self) -> Chunks:
        for _ in chunk_sizes(self._length):
            got = self._full.get()
            if not isinstance(got, np.ndarray):
                raise got
            yield got
            self._empty.put(got.base if isinstance(got.base, np.ndarray) else got)
        last = self._full.get()
        if not isinstance(last, np.ndarray):
            raise last

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            if self._connection is not None:
                self._connection.interrupt()
        self._empty.put(None)
        self._thread.join()

    def _note(self, connection: Connection) -> None:
        with self._lock:
            self._connection = connection
            if self._stopped:
                raise Closed("not wanted any more")

    def _run(self) -> None:
        name = f"node {self._address.node}"
        try:
            connection = dial(self._address, self._me, self._note)
            try:
                connection.silence(self._silence)
                connection.send(REQUEST, self._request)
                self._receive(connection)
            finally:
                connection.close()
        except Refusal as error:
            self._full.put(Refusal(f"{name}: {error}"))
        except TimeoutError:
            self._full.put(Silent(f"{name} was silent for {self._silence:.0f} s"))
        except (Closed, ProtocolError, OSError) as error:
            self._full.put(Disconnected(f"{name}: {error or type(error).__name__}"))

    def _receive(self, connection: Connection) -> None:
        total, ended = 0, False
        for offset, size in chunk_sizes(self._length):
            taken = self._empty.get()
            if taken is None:
                raise Closed("not wanted any more")
            buffer: Bytes = taken
            have = 0
            if not ended:
                answer, payload = connection.receive(ANSWERS, buffer)
                if isinstance(answer, Data):
                    have = payload.size
                    if answer.offset != offset or have > size or payload.base is not buffer:
                        raise ProtocolError(f"bytes from {answer.offset} instead of {offset}")
                    total = checksum(payload, total)
                else:
                    self._end(answer, total)
                    ended = True
            buffer[have:] = 0
            self._full.put(buffer[:size])
        if not ended:
            answer, _ = connection.receive(ANSWERS)
            self._end(answer, total)
        self._full.put(np.empty(0, dtype=np.uint8))

    @staticmethod
    def _end(answer: object, total: int) -> None:
        if isinstance(answer, Refused):
            raise Refusal(answer.reason)
        if not isinstance(answer, End):
            raise ProtocolError(f"{type(answer).__name__} instead of the end")
        if answer.crc != total:
            raise ProtocolError("what was sent does not match its checksum")


Source = AbstractContextManager[Chunks]
