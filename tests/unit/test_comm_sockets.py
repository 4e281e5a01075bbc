"""Only the epoch's connections are ended."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from leto_elastic.comm import sockets
from leto_elastic.comm.sockets import Address

Trio = tuple[socket.socket, socket.socket, socket.socket]


def connect(family: socket.AddressFamily = socket.AF_INET) -> Trio:
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.socket(family, socket.SOCK_STREAM)
    host = "127.0.0.1" if family == socket.AF_INET else "::ffff:127.0.0.1"
    client.connect((host, listener.getsockname()[1]))
    server, _ = listener.accept()
    return listener, client, server


@pytest.fixture
def pair() -> Iterator[tuple[Trio, Trio]]:
    first, second = connect(), connect()
    yield first, second
    for sock in (*first, *second):
        sock.close()


def alive(trio: Trio) -> bool:
    trio[1].settimeout(5)
    trio[2].settimeout(5)
    try:
        trio[1].sendall(b"x")
        return trio[2].recv(1) == b"x"
    except OSError:
        return False


def name(sock: socket.socket) -> Address:
    return Address(*sock.getsockname())


def test_ends_what_comes_from_the_listener(pair: tuple[Trio, Trio]) -> None:
    first, second = pair
    assert sockets.shut_down([name(first[0])], []) == 1
    assert not alive(first)
    assert alive(second)
    with socket.create_connection(name(first[0])):  # the listener listens
        pass


def test_ends_what_goes_to_a_peer(pair: tuple[Trio, Trio]) -> None:
    first, second = pair
    assert sockets.shut_down([], [name(second[0])]) == 1
    assert alive(first)
    assert not alive(second)
    sockets.shut_down([], [name(second[0])])  # once more does no harm


def test_addresses_of_both_families_are_the_same() -> None:
    listener, client, server = connect(socket.AF_INET6)
    with listener, client, server:
        assert sockets.connected_to("127.0.0.1", listener.getsockname()[1]) == {
            Address("127.0.0.1", client.getsockname()[1])
        }


def test_listening() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert sockets.listening()[listener.fileno()] == name(listener)


def test_knock_says_each_number() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sockets.knock(name(listener), range(3, 5))
        heard = []
        for _ in range(2):
            visitor, _ = listener.accept()
            with visitor:
                heard.append(struct.unpack("=q", visitor.recv(8))[0])
    assert heard == [3, 4]
    sockets.knock(Address("127.0.0.1", name_of_nobody()), range(1))  # nobody listens: no error


def name_of_nobody() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_an_address_survives_its_text() -> None:
    assert Address.parse(str(Address("10.0.0.1", 80))) == Address("10.0.0.1", 80)
    assert Address.parse("fe80::1:80") == Address("fe80::1", 80)
