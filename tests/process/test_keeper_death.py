"""A node's process ends: that it is dead, and nothing else, is noticed at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from leto_elastic.protect.engines import open_engine
from leto_elastic.protect.keeper import Keeper
from leto_elastic.protect.matrix import Code
from leto_elastic.protect.placement import Seat, place
from leto_elastic.protect.world import PeerAddress, World
from tests.unit.keeper_rig import KEY, Mail, until

pytestmark = pytest.mark.process


@dataclass
class Pair:
    """A keeper here at position 0, and one in another process at position 1."""

    keeper: Keeper
    mail: Mail
    child: subprocess.Popen[str]
    world: World

    def tell(self, line: str) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(line + "\n")
        self.child.stdin.flush()

    def hear(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()


@contextmanager
def pair() -> Iterator[Pair]:
    mail = Mail()
    keeper = Keeper(
        "job", "parent", KEY, "127.0.0.1", engine=open_engine(), limit=1 << 28, on_lost=mail.on_lost,
        on_event=mail.on_event,
    )  # fmt: skip
    host, port = keeper.start()
    with subprocess.Popen(
        [sys.executable, "-m", "tests.process.keeper_node", KEY.hex()],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        try:
            placement = place([Seat(0, "a", (0,)), Seat(1, "b", (1,))], 1, 1)
            made = Pair(keeper, mail, child, None)  # type: ignore[arg-type]
            address = made.hear().split()
            peer = PeerAddress("child", address[0], int(address[1]))
            made.world = World(0, 0, 0, {1: peer}, placement, None, Code(1, 1), {0: 0, 1: 1})
            keeper.configure(made.world)
            made.tell(f"{host}\n{port}")
            assert made.hear() == "configured"
            until(lambda: keeper._peers[1].connected)
            yield made
        finally:
            child.kill()
            keeper.close()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_process_is_lost_at_once(stopped: bool) -> None:
    with pair() as made:
        if stopped:
            os.kill(made.child.pid, signal.SIGSTOP)
        start = time.monotonic()
        made.child.kill()
        made.mail.wait(lambda: bool(made.mail.lost))
        position, reason, at = made.mail.lost[0]
        assert position == 1
        assert "Connection refused" in reason
        assert at - start < 0.5, f"{(at - start) * 1000:.0f} ms"
        assert len(made.mail.lost) == 1


def test_a_stopped_process_is_not_lost() -> None:
    """It does not answer, but it is there; and it does not block anybody."""
    with pair() as made:
        os.kill(made.child.pid, signal.SIGSTOP)
        for version in range(20):
            made.keeper.publish(0, "extras", version, bytes(1 << 20))
        made.keeper.configure(made.world._replace(epoch=1))
        assert not made.mail.lost


def test_a_keeper_that_closes_is_not_lost() -> None:
    with pair() as made:
        made.tell("close")
        assert made.hear() == "closed"
        until(lambda: not made.keeper._peers[1].alive)
        assert not made.mail.lost


def test_a_replaced_node_is_dropped_without_a_word() -> None:
    with pair() as made:
        made.keeper.configure(made.world._replace(epoch=1, peers={}))
        made.child.kill()
        made.child.wait()
        assert not made.mail.lost
