"""gloo forgets a buffer that is partly sent when its connection ends: the sender has to come back all the same.

This process is rank 0, so that its ordinary end is tested too, with gloo's thread still asleep in the lost collective.
"""

from __future__ import annotations

import json
import signal
import threading
import time

import torch
import torch.distributed as dist

from leto_elastic.comm import quiet
from tests.process.comm_ranks import DEADLINE, Channel, Rank, joined, new_store

LARGE = 1 << 24  # floats: far more than a socket buffers


def peer(rank: int, channel: Channel) -> None:
    """Start to receive, then be stopped."""
    joined(rank, 2, channel.expect("plan")[0])
    work = dist.broadcast(torch.empty(LARGE), 0, async_op=True)
    while not quiet._asleep():
        pass
    channel.send("receiving")
    work.wait()


def spare(rank: int, channel: Channel) -> None:
    joined(rank, 2, channel.expect("plan")[0], epoch=1)
    dist.all_reduce(torch.ones(LARGE))


def main() -> None:
    first, second = Rank(1, peer), Rank(1, spare)
    store = new_store()
    first.channel.send("plan", store.port)
    fabric = joined(0, 2, store.port)
    first.channel.expect("receiving")
    first.kill(signal.SIGSTOP)

    aborted: list[float] = []

    def abort() -> None:
        aborted.append(time.monotonic())
        fabric.abort(0, "test")

    threading.Timer(0.2, abort).start()
    fabric.tolerant = True
    value = torch.ones(LARGE)
    future = dist.broadcast(value, 0, async_op=True).get_future()
    assert future.wait()[0].data_ptr() == value.data_ptr()
    woken = time.monotonic() - aborted[0]
    poisoned = fabric.poisoned
    fabric.tolerant = False

    second.channel.send("plan", store.port)
    fabric.connect(1, "127.0.0.1", store.port, DEADLINE)
    dist.all_reduce(value)
    correct = bool((value == 2.0).all())
    first.kill(signal.SIGKILL)
    first.end()
    result = {"woken": woken, "poisoned": poisoned, "correct": correct, "exits": [second.end()]}
    print(json.dumps({**result, "parked": len(fabric._parked), "end": time.monotonic()}))


if __name__ == "__main__":
    main()
