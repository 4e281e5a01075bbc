"""Whoever waits for a collective that gloo never ends goes on as soon as it is abandoned, whatever the collective."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from leto_elastic.comm.work import LetoWork
from tests.process.comm_cycles import OPERATIONS
from tests.process.comm_ranks import Channel, Rank, joined, new_store

WAITING = 0.05  # seconds, for the wait to have begun


def alone(rank: int, channel: Channel) -> None:
    """Begin each operation without the peer, wait for it, and let a thread abandon it."""
    fabric = joined(rank, 2, channel.expect("plan")[0])
    fabric.tolerant = True
    seconds = {}
    for name in set(OPERATIONS) - {"monitored barrier"}:  # which blocks by itself
        work: Any = OPERATIONS[name]()
        assert isinstance(work, LetoWork)
        timer = threading.Timer(WAITING, work.abandon)
        timer.start()
        begin = time.monotonic()
        work.wait()
        seconds[name] = time.monotonic() - begin - WAITING
        timer.join()
        fabric.poisoned = False
    channel.send("seconds", seconds)


def absent(rank: int, channel: Channel) -> None:
    """The peer, which begins nothing."""
    joined(rank, 2, channel.expect("plan")[0])
    channel.expect("bye")


def main() -> None:
    ranks = [Rank(0, alone), Rank(1, absent)]
    store = new_store()
    for rank in ranks:
        rank.channel.send("plan", store.port)
    (seconds,) = ranks[0].channel.expect("seconds")
    ranks[1].channel.send("bye")
    print(json.dumps({"seconds": seconds, "exits": [rank.end() for rank in ranks]}))


if __name__ == "__main__":
    main()
