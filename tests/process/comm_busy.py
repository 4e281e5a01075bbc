"""Aborts at any instant of ranks that are never idle: each of their collectives wakes, gloo keeps none."""

from __future__ import annotations

import itertools
import json
import random

import torch
import torch.distributed as dist

from leto_elastic.comm import Fabric
from leto_elastic.errors import CommunicatorLost
from tests.process.comm_ranks import DEADLINE, Channel, Listener, Rank, new_store

SIZE = 3
ABORTS = 150


def member(rank: int, channel: Channel) -> None:
    fabric = Fabric(rank, SIZE, timeout=DEADLINE, rebuild=DEADLINE)
    fabric.register()
    listener = Listener(channel, lambda epoch: fabric.abort(epoch, "test"))
    for _ in range(ABORTS + 1):
        _, epoch, port, rounds = listener.plan()
        fabric.connect(epoch, "127.0.0.1", port, DEADLINE)
        if epoch == 0:
            dist.init_process_group("leto", store=fabric.store, rank=rank, world_size=SIZE)
        if epoch == ABORTS:
            break
        values = [torch.ones(4), torch.ones(40)]
        try:
            for number in itertools.count():
                if number == rounds:
                    channel.send("busy")
                works = [dist.all_reduce(value, async_op=True) for value in values]
                dist.broadcast(values[0], epoch % SIZE)
                for work in works:
                    work.wait()
        except CommunicatorLost:
            channel.send("lost")
    channel.send("done", len(fabric._parked))


def main() -> None:
    choice = random.Random(1)
    ranks = [Rank(rank, member) for rank in range(SIZE)]
    store = new_store()
    for epoch in range(ABORTS + 1):
        rounds = choice.randrange(10)
        for rank in ranks:
            rank.channel.send("plan", epoch, store.port, rounds)
        if epoch < ABORTS:
            for rank in ranks:
                rank.channel.expect("busy")
            for rank in ranks:
                rank.channel.send("abort", epoch)
            for rank in ranks:
                rank.channel.expect("lost")
    parked = [rank.channel.expect("done")[0] for rank in ranks]
    print(json.dumps({"parked": parked, "exits": [rank.end() for rank in ranks]}))


if __name__ == "__main__":
    main()
