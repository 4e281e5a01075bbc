"""A keeper in a process of its own: prints its address, connects to the one it is told of, and waits."""

from __future__ import annotations

import sys

from leto_elastic.protect.engines import open_engine
from leto_elastic.protect.keeper import Keeper
from leto_elastic.protect.matrix import Code
from leto_elastic.protect.placement import Seat, place
from leto_elastic.protect.world import PeerAddress, World
from tests.unit.keeper_rig import until


def main() -> None:
    key = bytes.fromhex(sys.argv[1])
    keeper = Keeper(
        "job", "child", key, "127.0.0.1", engine=open_engine(), limit=1 << 28,
        on_lost=lambda position, reason: print("lost", position, flush=True),
        on_event=lambda *_: None,
    )  # fmt: skip
    host, port = keeper.start()
    print(host, port, flush=True)
    parent = PeerAddress("parent", sys.stdin.readline().strip(), int(sys.stdin.readline()))
    placement = place([Seat(0, "a", (0,)), Seat(1, "b", (1,))], 1, 1)
    keeper.configure(World(0, 0, 1, {0: parent}, placement, None, Code(1, 1), {0: 0, 1: 1}))
    until(lambda: keeper._peers[0].connected)
    print("configured", flush=True)
    if sys.stdin.readline() == "close\n":
        keeper.close()
        print("closed", flush=True)


if __name__ == "__main__":
    main()
