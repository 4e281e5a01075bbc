"""What must not be believed: garbage, wrong keys, half frames, and peers that ask for what is not theirs."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import struct
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leto_elastic.protect import frames, handshake
from leto_elastic.protect.frames import ANSWERS, HANDSHAKE, REQUEST, Closed, Connection, ProtocolError
from leto_elastic.protect.handshake import Identity, WrongNode
from leto_elastic.protect.messages import (
    CHUNK,
    Begin,
    Challenge,
    Chunk,
    Copy,
    Data,
    Done,
    End,
    Fetch,
    Finish,
    Go,
    Greeting,
    Message,
    Proof,
    Put,
    ReadPiece,
    ReadUnit,
    Refused,
)
from leto_elastic.protect.peer import dial
from leto_elastic.protect.server import STRANGERS, Server
from leto_elastic.protect.world import PeerAddress
from leto_elastic.state.header import tag_of
from tests.unit.keeper_rig import DEADLINE, KEY, Job, copies, job

TAG = tag_of(5, 0)
NEXT, BEFORE = tag_of(6, 0), tag_of(4, 0)
ENDED = (Closed, ProtocolError, ConnectionResetError, BrokenPipeError)


@pytest.fixture(scope="module")
def made() -> Iterator[Job]:
    """Two ranks at each of three nodes, RS(2, 1), with one protected version."""
    with job([2, 2, 2], (2, 1), sizes=[1000], deadline=0.2) as made:
        made.protect(TAG, 5)
        yield made


def holds(made: Job) -> list[object]:
    return [(node.keeper.holdings(), node.keeper._copies._budget.held) for node in made.nodes.values()]


@contextmanager
def connected(address: PeerAddress) -> Iterator[socket.socket]:
    with socket.create_connection((address.host, address.port), timeout=DEADLINE) as sock:
        yield sock


def closed(sock: socket.socket) -> bool:
    """Whether the other side closes, having said nothing that is not part of a handshake."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def frame(kind: int, header: bytes, payload: bytes = b"", *, sizes: tuple[int, int] | None = None) -> bytes:
    lengths = sizes or (len(header), len(payload))
    fixed = struct.pack("<4sBxHIII", b"LtK1", kind, *lengths, zlib.crc32(header), zlib.crc32(payload))
    return fixed + struct.pack("<I", zlib.crc32(fixed)) + header + payload


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.one_of(
        st.binary(min_size=1, max_size=200),
        st.builds(lambda header: frame(HANDSHAKE, header), st.binary(max_size=300)),
        st.builds(lambda header: frame(REQUEST, header), st.binary(max_size=300)),
        st.builds(lambda a, b: frame(HANDSHAKE, b"", sizes=(a, b)), st.integers(0, 65535), st.integers(0, 2**32 - 1)),
        st.builds(lambda data: b"LtK1" + data, st.binary(max_size=100)),
    )
)
def test_garbage(made: Job, data: bytes) -> None:
    before = holds(made)
    with connected(made.nodes[0].address) as sock:
        with contextlib.suppress(OSError):  # it may be closed already
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        assert closed(sock)
    assert holds(made) == before


def test_no_request_before_the_handshake(made: Job) -> None:
    with connected(made.nodes[0].address) as sock:
        connection = Connection(sock)
        connection.send(REQUEST, Fetch(0, 0, "record", 0, -1))
        with pytest.raises(ENDED):
            connection.receive(ANSWERS)


@pytest.mark.parametrize(
    ("me", "node"),
    [
        (Identity("job", "node-1", b"k" * 32), "node-0"),
        (Identity("another job", "node-1", KEY), "node-0"),
        (Identity("job", "node-1", KEY), "node-7"),
    ],
)
def test_who_is_not_let_in(made: Job, me: Identity, node: str, caplog: pytest.LogCaptureFixture) -> None:
    address = made.nodes[0].address._replace(node=node)
    with pytest.raises((*ENDED, WrongNode)):
        dial(address, me)


def test_a_proof_cannot_be_made_without_the_key(made: Job) -> None:
    """Nor from what the other side has shown: roles are part of it."""
    with connected(made.nodes[0].address) as sock:
        connection = Connection(sock)
        connection.send(HANDSHAKE, Greeting("job", "node-1", bytes(32)))
        challenge, _ = connection.receive(frames.CHALLENGE)
        connection.send(HANDSHAKE, Proof(challenge.proof))
        with pytest.raises(ENDED):
            connection.receive(frames.ADMITTED)


def test_a_listener_without_the_key_learns_nothing() -> None:
    """A keeper that is led to a stranger ends there, before it has proved itself."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with closing(here), closing(there):
        mine, theirs = _unchecked(here), _unchecked(there)
        theirs.send(HANDSHAKE, Challenge("node-1", bytes(32), bytes(32)))
        with pytest.raises(ProtocolError, match="does not have the key"):
            handshake.introduce(mine, Identity("job", "node-0", KEY), "node-1")
        theirs.receive(frames.GREETING)
        here.shutdown(socket.SHUT_WR)
        with pytest.raises(Closed):
            theirs.receive(frames.PROOF)


def _unchecked(sock: socket.socket) -> Connection:
    connection = Connection.__new__(Connection)
    connection._sock, connection._deadline = sock, None
    return connection


def test_a_slow_handshake(caplog: pytest.LogCaptureFixture) -> None:
    server = Server("127.0.0.1", Identity("job", "a", KEY, deadline=0.2), lambda *_: Done())
    try:
        with connected(PeerAddress("a", server.host, server.port)) as sock:
            sock.sendall(b"Lt")
            assert closed(sock)
    finally:
        server.close(DEADLINE)
    assert re.search(r"connection from 127.0.0.1 dropped: (timed out|the deadline passed)", caplog.text)


def test_one_line_for_many(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with job([1], None) as alone:
        for _ in range(20):
            with connected(alone.nodes[0].address) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
                assert closed(sock)
    assert caplog.messages == ["connection from 127.0.0.1 dropped: not a frame of a keeper"]


def test_many_that_do_not_prove_themselves() -> None:
    with job([1], None) as alone:
        address = alone.nodes[0].address
        socks = [socket.create_connection(address[1:]) for _ in range(STRANGERS)]
        with connected(address) as sock:
            assert closed(sock)
        for sock in socks:
            sock.close()


@contextmanager
def admitted(made: Job, position: int = 0, node: str = "node-1") -> Iterator[Connection]:
    """A connection with the right key, by a node that does what it likes."""
    connection = dial(made.nodes[position].address, Identity("job", node, KEY))
    connection.silence(DEADLINE)
    try:
        yield connection
    finally:
        connection.close()


def ask(connection: Connection, message: Message, payload: bytes = b"") -> object:
    connection.send(REQUEST, message, payload)
    return connection.receive(ANSWERS)[0]


# RS(2, 1) over three nodes: stripe 1 has part 0 of rank 2 (position 1), part 1 of rank 4, and is kept at position 0


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Begin(0, NEXT, -1, 99, 0, 0, 10), "the job has no stripe 99; it has 6"),
        (Begin(0, NEXT, -1, 0, 0, 0, 10), "parity piece 0 of stripe 0 is not kept at position 0"),
        (Begin(0, NEXT, -1, 1, 1, 0, 10), "parity piece 1 of stripe 1 is not kept at position 0"),
        (Begin(0, NEXT, -1, 1, 0, 7, 10), "stripe 1 has no data unit 7"),
        (Begin(0, NEXT, -1, 1, 0, 1, 10), "rank 4 does not sit on node node-1 at position 1"),
        (
            Begin(0, NEXT, -1, 1, 0, 0, 1 << 50),
            r"needs 1073741824.0 MiB; this keeper holds 0.0 MiB and may hold 1024.0",
        ),
        (Begin(0, tag_of(6, 1), -1, 1, 0, 0, 10), "is not of generation 0"),
        (Begin(0, BEFORE, -1, 1, 0, 0, 10), "is superseded by"),
        (Begin(0, TAG, -1, 1, 0, 0, 999), "unit 0 of .* has 512 bytes at tag .*, not 999"),
        (Begin(3, NEXT, -1, 1, 0, 0, 10), "no plan of epoch 3 here: waited 0 s"),
        (Chunk(0, TAG, 1, 0, 0, 0), "bytes 0 to 4 of unit 0 of .*: it has 512, the next is 512"),
        (Chunk(0, NEXT, 1, 0, 0, 0), "was not begun at tag"),
        (Finish(0, NEXT, 1, 0, 0, 0), "was not begun at tag"),
        (Put(0, 99, "extras", 3, -1, -1), "the job has no rank 99"),
        (Put(0, 0, "extras", 3, -1, -1), "position 0 keeps no copies of rank 0"),
        (Put(0, 4, "extras", 3, -1, -1), "rank 4 does not sit on node node-1|keeps no copies of rank 4"),
        (ReadUnit(0, 0, 5, -1, 0, 2, 10), "rank 0 does not stand at version 5"),
        (ReadUnit(0, 99, 5, -1, 0, 2, 10), "rank 99 does not stand at version 5"),
        (ReadPiece(0, TAG, 0, 0, 10), "is not kept at position 0"),
        (ReadPiece(0, NEXT, 1, 0, 10), "is not whole here at tag"),
        (Fetch(0, 99, "manifest", 1, -1), "no manifest 1 of rank 99 here"),
    ],
)
def test_what_a_peer_may_not(made: Job, message: Message, reason: str) -> None:
    before = holds(made)
    with admitted(made) as connection:
        answer = ask(connection, message, b"abcd" if isinstance(message, (Chunk, Put)) else b"")
        assert isinstance(answer, Refused)
        assert re.search(reason, answer.reason), answer.reason
        assert isinstance(ask(connection, Begin(0, TAG, -1, 1, 0, 0, 512)), Go)  # it goes on
    assert holds(made) == before


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Put(0, 4, "extras", 6, tag_of(6, 1), -1), "is of a later generation than 0"),
        (Put(0, 4, "sums", 6, -1, -1), "sums without a tag"),
        (Put(0, 4, "record", 6, NEXT, -1), "a record belongs to no protected version"),
    ],
)
def test_copies_that_cannot_be(made: Job, message: Message, reason: str) -> None:
    before = holds(made)
    with admitted(made, node="node-2") as connection:
        answer = ask(connection, message, b"abcd")
        assert isinstance(answer, Refused)
        assert reason in answer.reason
    assert holds(made) == before


def test_a_node_that_is_not_in_the_job_any_more(made: Job) -> None:
    with admitted(made, node="node-9") as connection:
        answer = ask(connection, Fetch(0, 0, "manifest", 1, -1))
    assert answer == Refused("node node-9 is not in epoch 0 of the job")


natural = st.integers(0, 9)
tags = st.one_of(st.sampled_from([TAG, NEXT, BEFORE]), st.integers(0, 2**50))
requests = st.one_of(
    st.builds(Put, st.just(0), natural, st.sampled_from(["record", "manifest", "extras", "sums"]), natural, tags, tags),
    st.builds(Begin, st.just(0), tags, tags, natural, natural, natural, natural),
    st.builds(Chunk, st.just(0), tags, natural, natural, natural, natural),
    st.builds(Finish, st.just(0), tags, natural, natural, natural, natural),
    st.builds(Fetch, st.just(0), natural, st.sampled_from(["record", "sums"]), natural, tags),
    st.builds(ReadPiece, st.just(0), tags, natural, natural, natural),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(requests, st.binary(max_size=12)), max_size=12))
def test_any_requests_get_an_answer(asked: list[tuple[Message, bytes]]) -> None:
    with job([2, 2, 2], (2, 1), sizes=[10], deadline=0.2) as made, admitted(made, 0) as connection:
        for message, payload in asked:
            answer = ask(connection, message, payload if isinstance(message, (Chunk, Put)) else b"")
            while isinstance(answer, Data):
                answer = connection.receive(ANSWERS)[0]
            assert isinstance(answer, (Done, Go, Copy, End, Refused))
        assert made.nodes[0].keeper._copies._budget.held >= 0
        for _, stripe, piece in made.nodes[0].keeper.holdings().pieces:
            assert (stripe, piece) in made.placement.held_by(0)  # type: ignore[union-attr]


@pytest.mark.parametrize("at", [0, 5, 9, 17, 25, 40, 300])
def test_a_flipped_byte_is_noticed(at: int) -> None:
    here, there = socket.socketpair()
    with closing(here), closing(there):
        data = bytearray(frame(REQUEST, frames._encode(Chunk(0, TAG, 1, 0, 0, 0)), bytes(500)))
        data[at] ^= 0x10
        here.sendall(data)
        here.shutdown(socket.SHUT_WR)
        with pytest.raises(ProtocolError):
            _unchecked(there).receive(frames.REQUESTS)


def test_a_payload_larger_than_its_message_may_have() -> None:
    here, there = socket.socketpair()
    with closing(here), closing(there):
        header = frames._encode(Chunk(0, TAG, 1, 0, 0, 0))
        here.sendall(frame(REQUEST, header, sizes=(len(header), CHUNK + 1)))
        with pytest.raises(ProtocolError, match=f"Chunk with {CHUNK + 1} bytes, more than {CHUNK}"):
            _unchecked(there).receive(frames.REQUESTS)
        with pytest.raises(ProtocolError, match="is too large"):
            _unchecked(here).send(REQUEST, Begin(0, 1, 1, 1, 1, 1, 1), b"x")


def test_a_frame_goes_through_as_it_is() -> None:
    here, there = socket.socketpair()
    with closing(here), closing(there):
        payload = np.arange(1000, dtype=np.uint8)
        _unchecked(here).send(REQUEST, Chunk(0, TAG, 1, 0, 0, 0), payload)
        into = np.empty(CHUNK, dtype=np.uint8)
        message, got = _unchecked(there).receive(frames.REQUESTS, into)
        assert message == Chunk(0, TAG, 1, 0, 0, 0)
        assert got.tobytes() == payload.tobytes()
        assert got.base is into


def test_ipv6() -> None:
    server = Server("::1", Identity("job", "a", KEY), lambda *_: Done())
    try:
        connection = dial(PeerAddress("a", server.host, server.port), Identity("job", "b", KEY))
        assert isinstance(ask(connection, Fetch(0, 0, "record", 0, -1)), Done)
        connection.close()
    finally:
        server.close(DEADLINE)


def test_copies_of_local_ranks_go_to_their_keepers_only() -> None:
    with job([1, 1, 1], (2, 1)) as made:
        copies(made)
        made.protect(TAG, 5)
        assert made.placement is not None
        for position, node in made.nodes.items():
            held = set(node.keeper._copies.ranks())
            assert held == {rank for rank in made.positions if position in made.placement.keepers_of(rank)}
