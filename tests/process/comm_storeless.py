"""The store goes while a rank waits in it for the other one, and the abort comes later."""

from __future__ import annotations

import json

from leto_elastic.comm import Fabric
from leto_elastic.errors import CommunicatorLost, EpochAborted
from tests.process.comm_ranks import DEADLINE, Channel, Listener, Rank, new_store

PATIENCE = 2.0  # seconds


def member(rank: int, channel: Channel) -> None:
    fabric = Fabric(rank, 2, timeout=DEADLINE)
    fabric.register()
    listener = Listener(channel, lambda epoch: fabric.abort(epoch, "the node of the store was lost"))
    await_abort = fabric._await_abort

    def alone(epoch: int, end: float) -> None:
        channel.send("alone")
        await_abort(epoch, end)

    fabric._await_abort = alone  # type: ignore[method-assign]
    told: list[str] = []
    for deadline in (DEADLINE, PATIENCE):
        _, epoch, port = listener.plan()
        channel.send("joining")
        try:
            fabric.connect(epoch, "127.0.0.1", port, deadline)
        except (EpochAborted, CommunicatorLost) as error:
            told.append(f"{type(error).__name__}: {error}")
        channel.send("over")
    channel.send("done", told)


def main() -> None:
    rank = Rank(0, member)
    for epoch in range(2):
        store = new_store()
        rank.channel.send("plan", epoch, store.port)
        rank.channel.expect("joining")
        while not store.check([f"epoch/{epoch}/device/0"]):
            pass
        del store
        rank.channel.expect("alone")
        if epoch == 0:
            rank.channel.send("abort", epoch)
        rank.channel.expect("over")
    print(json.dumps({"told": rank.channel.expect("done")[0], "exits": [rank.end()]}))


if __name__ == "__main__":
    main()
