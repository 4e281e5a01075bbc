"""Four ranks in all-reduces; one is killed or stopped, the others are woken, a spare takes its rank."""

from __future__ import annotations

import json
import signal
import sys
import time

import torch
import torch.distributed as dist

from leto_elastic.comm import Fabric
from leto_elastic.errors import EpochAborted
from tests.process.comm_ranks import DEADLINE, Channel, Listener, Rank, new_store

SIZE = 4
VICTIM = 2


def connect_to_plan(fabric: Fabric, listener: Listener) -> int:
    """Join the first planned epoch that is not aborted; returns how many were."""
    given_up = 0
    while True:
        _, epoch, port = listener.plan()
        try:
            fabric.connect(epoch, "127.0.0.1", port, DEADLINE)
        except EpochAborted:
            given_up += 1
        else:
            return given_up


def check(fabric: Fabric, pair: dist.ProcessGroup) -> None:
    """Every group works and gives what it should."""
    rank = fabric.rank
    total = torch.full((1000,), float(rank))
    dist.all_reduce(total)
    assert torch.equal(total, torch.full((1000,), 6.0)), total
    half = torch.full((3,), float(rank))
    dist.all_reduce(half, group=pair)
    assert half[0] == (1.0 if rank < 2 else 5.0), half
    assert fabric.vote(10 + rank) == 10
    assert fabric.exchange([rank, -rank]) == [[r, -r] for r in range(SIZE)]


def member(rank: int, channel: Channel) -> None:
    """A trainer, or the spare: that one starts on loopback groups."""
    spare = channel.expect("role") == ["spare"]
    fabric = Fabric(rank, SIZE, timeout=DEADLINE, loopback=spare, rebuild=DEADLINE)
    fabric.register()
    listener = Listener(channel, lambda epoch: fabric.abort(epoch, "test"))
    if not spare:
        connect_to_plan(fabric, listener)
    dist.init_process_group("leto", store=fabric.store, rank=rank, world_size=SIZE)
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    value = torch.ones(1 << 20)
    woken = 0.0
    if not spare:
        check(fabric, pair)
        channel.send("running")
        fabric.tolerant = True
        while not fabric.poisoned:
            dist.all_reduce(value)
            dist.all_reduce(value[:10], group=pair)
        woken = time.monotonic()
        assert fabric.vote() is None
        fabric.tolerant = False
    channel.send("lost", woken)
    given_up = connect_to_plan(fabric, listener)
    check(fabric, pair)
    channel.send("rejoined", given_up)


def main(sign: signal.Signals, *, abort_while_connecting: bool) -> None:
    ranks = [Rank(rank, member) for rank in range(SIZE)]
    spare, late = Rank(VICTIM, member), Rank(VICTIM, member)
    stores = [new_store()]
    for rank in ranks:
        rank.channel.send("role", "trainer")
        rank.channel.send("plan", 0, stores[0].port)
    for rank in (spare, late):
        rank.channel.send("role", "spare")
        rank.channel.expect("lost")
    for rank in ranks:
        rank.channel.expect("running")

    ranks[VICTIM].kill(sign)
    survivors = [rank for rank in ranks if rank.rank != VICTIM]
    aborted = time.monotonic()
    for rank in survivors:
        rank.channel.send("abort", 0)
    woken = [rank.channel.expect("lost")[0] - aborted for rank in survivors]

    epoch, members = 1, [*survivors, spare]
    stores.append(new_store())
    if abort_while_connecting:
        # The spare dies instead of coming, with the survivors waiting for it.
        for rank in survivors:
            rank.channel.send("plan", 1, stores[1].port)
        stores[1].wait([f"epoch/1/device/{rank.rank}" for rank in survivors])
        spare.kill(signal.SIGKILL)
        for rank in survivors:
            rank.channel.send("abort", 1)
        epoch, members = 2, [*survivors, late]
        stores.append(new_store())
    else:
        late.kill(signal.SIGKILL)
    started = time.monotonic()
    for rank in members:
        rank.channel.send("plan", epoch, stores[-1].port)
    given_up = [rank.channel.expect("rejoined")[0] for rank in members]
    rejoined = time.monotonic() - started
    exits = [rank.end() for rank in members]
    ranks[VICTIM].kill(signal.SIGKILL)
    for rank in (ranks[VICTIM], spare, late):
        if rank not in members:
            rank.end()
    print(json.dumps({"woken": woken, "rejoined": rejoined, "given_up": given_up, "exits": exits}))


if __name__ == "__main__":
    main(signal.Signals[sys.argv[1]], abort_while_connecting=sys.argv[2] == "again")
