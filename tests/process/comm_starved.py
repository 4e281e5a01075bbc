"""Aborts while gloo's own event thread, which has to tell of them, hardly gets to run. Rank 1 only ever connects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

from tests.process.comm_ranks import DEADLINE, Channel, Rank, joined, new_store

ABORTS = 20
CPU = min(os.sched_getaffinity(0))


def starve() -> None:
    """Let the event thread run only when nothing else wants its CPU."""
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "gloo_tcp_loop":
            os.sched_setaffinity(int(task.name), {CPU})
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))


def lonely(rank: int, channel: Channel) -> None:
    port = channel.expect("plan")[0]
    fabric = joined(rank, 2, port)
    fabric.tolerant = True
    abandoned = 0
    for epoch in range(ABORTS):
        starve()
        timer = threading.Timer(0.01, fabric.abort, [epoch, "test"])
        timer.start()
        dist.all_reduce(torch.ones(4))
        timer.join()
        abandoned += len(fabric._stuck)
        channel.send("lost")
        fabric.connect(epoch + 1, "127.0.0.1", port, DEADLINE)
    channel.send("done", abandoned)


def absent(rank: int, channel: Channel) -> None:
    port = channel.expect("plan")[0]
    fabric = joined(rank, 2, port)
    for epoch in range(ABORTS):
        channel.expect("next")
        fabric.connect(epoch + 1, "127.0.0.1", port, DEADLINE)


def main() -> None:
    ranks = [Rank(0, lonely), Rank(1, absent)]
    store = new_store()
    for rank in ranks:
        rank.channel.send("plan", store.port)
    busy = f"import os\nos.sched_setaffinity(0, {{{CPU}}})\nwhile True:\n    pass"
    hogs = [subprocess.Popen([sys.executable, "-c", busy]) for _ in range(2)]
    try:
        for _ in range(ABORTS):
            ranks[0].channel.expect("lost")
            ranks[1].channel.send("next")
        (abandoned,) = ranks[0].channel.expect("done")
        exits = [rank.end() for rank in ranks]
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    print(json.dumps({"abandoned": abandoned, "exits": exits}))


if __name__ == "__main__":
    main()
