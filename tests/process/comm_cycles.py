"""Two ranks, many aborts: each operation in turn is left without its peer, aborted, and every group rebuilt."""

from __future__ import annotations

import functools
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from leto_elastic.comm import Fabric
from leto_elastic.errors import CommunicatorLost
from tests.process.comm_ranks import DEADLINE, Channel, Rank, joined, new_store

CYCLES = 52
SETTLED = 2  # cycle after which nothing may grow any more
ANY = "recv from any"


def _ones() -> torch.Tensor:
    return torch.ones(4)


# What rank 0 does while rank 1 does nothing: each returns a work or has blocked by itself.
OPERATIONS: dict[str, Callable[[], object]] = {
    "allreduce": lambda: dist.all_reduce(_ones(), async_op=True),
    "large allreduce": lambda: dist.all_reduce(torch.ones(1 << 20), async_op=True),
    "broadcast": lambda: dist.broadcast(_ones(), 1, async_op=True),
    "all_gather": lambda: dist.all_gather([_ones(), _ones()], _ones(), async_op=True),
    "reduce_scatter": lambda: dist.reduce_scatter_single(_ones(), torch.ones(8), async_op=True),
    "reduce_scatter list": lambda: dist.reduce_scatter(_ones(), [_ones(), _ones()], async_op=True),
    "all_to_all": lambda: dist.all_to_all_single(_ones(), _ones(), async_op=True),
    "gather": lambda: dist.gather(_ones(), [_ones(), _ones()], 0, async_op=True),
    "scatter": lambda: dist.scatter(_ones(), None, 1, async_op=True),
    "barrier": lambda: dist.barrier(async_op=True),
    "recv": lambda: dist.irecv(_ones(), 1),
    ANY: lambda: dist.irecv(_ones()),
    "monitored barrier": lambda: dist.group.WORLD.monitored_barrier(timedelta(seconds=DEADLINE)),  # type: ignore[attr-defined]
    "two at once": lambda: (dist.all_reduce(_ones(), async_op=True), dist.all_reduce(_ones(), async_op=True))[1],
}


def resources() -> tuple[int, int]:
    """Open descriptors and threads of this process, as the kernel counts them."""
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


def innocent() -> tuple[socket.socket, socket.socket, socket.socket]:
    """A TCP connection of the user's own, with its listener."""
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    return listener, client, server


def lose(fabric: Fabric, operation: Callable[[], object], *, tolerant: bool) -> bool:
    """Run an operation that an abort ends; whether it did what it should."""
    fabric.tolerant = tolerant
    try:
        work = operation()
        done = work is None or work.wait()  # type: ignore[attr-defined]
    except CommunicatorLost:
        done = not tolerant
    else:
        done = done and tolerant
    fabric.tolerant = False
    return bool(done) and fabric.poisoned


def member(names: list[str], cycles: int, rank: int, channel: Channel) -> None:
    fabric = joined(rank, 2, channel.expect("plan")[1])
    pair = dist.new_group([0, 1])
    mine = innocent()
    counts, slowest, wrong = [], {}, []
    for epoch in range(1, cycles + 1):
        name = names[epoch % len(names)]
        tolerant = epoch // len(names) % 2 == 0
        dist.barrier()
        if rank == 0:
            aborted: list[float] = []

            def abort(number: int = epoch - 1, at: list[float] = aborted) -> None:
                at.append(time.monotonic())
                fabric.abort(number, "test")

            timer = threading.Timer(0.02, abort)
            timer.start()
            if not lose(fabric, OPERATIONS[name], tolerant=tolerant):
                wrong.append((name, tolerant))
            slowest[name] = max(slowest.get(name, 0.0), time.monotonic() - aborted[0])
            timer.join()
        channel.send("lost")
        port = channel.expect("plan")[1]
        if rank == 1 and epoch % 2:
            fabric.abort(epoch - 1, "test")  # in the other epochs this rank comes without an abort
        fabric.connect(epoch, "127.0.0.1", port, DEADLINE)
        value = torch.full((10,), float(rank))
        dist.all_reduce(value, group=pair)
        if value[0] != 1.0 or fabric.vote(rank) != 0:
            wrong.append(("after", epoch))
        if epoch in (SETTLED, cycles):
            counts.append(resources())
    mine[1].sendall(b"still here")
    channel.send("done", counts, slowest, wrong, mine[2].recv(100).decode())
    channel.expect("bye")
    dist.destroy_process_group()


def main(names: list[str], cycles: int) -> None:
    ranks = [Rank(rank, functools.partial(member, names, cycles)) for rank in range(2)]
    store = new_store()  # one for all epochs
    for rank in ranks:
        rank.channel.send("plan", 0, store.port)
    for epoch in range(1, cycles + 1):
        for rank in ranks:
            rank.channel.expect("lost")
        for rank in ranks:
            rank.channel.send("plan", epoch, store.port)
    reports = [rank.channel.expect("done") for rank in ranks]
    for rank in ranks:
        rank.channel.send("bye")
    exits = [rank.end() for rank in ranks]
    print(json.dumps({"reports": reports, "exits": exits}))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main([sys.argv[1]], 2)
    else:
        main([name for name in OPERATIONS if name != ANY], CYCLES)
