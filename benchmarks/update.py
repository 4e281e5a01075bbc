"""What the transaction adds to an optimizer's step, in one process without peers: the parts of a step, in milliseconds.

    OMP_NUM_THREADS=1 PYTHONPATH=examples python benchmarks/update.py --size small

`raw` is AdamW's own step, `transaction` the whole of saving the gradients and updating chunk by chunk with pre-images;
`gradients`, `pre-images` and `extras` are parts of it. Medians; the sizes of chunks are measured in turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import lm
from leto_elastic.state.header import Phase, Position
from leto_elastic.state.retained import Retained
from leto_elastic.state.train_state import TrainState
from leto_elastic.state.transaction import Transaction, raw_step


def alloc(name: str, size: int) -> int:
    """A segment of this process."""
    fd = os.memfd_create(name)
    os.posix_fallocate(fd, 0, size)
    return fd


def median_ms(work: Callable[[], Any], times: int = 15) -> float:
    """Median duration of a call."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        taken.append((time.perf_counter() - began) * 1e3)
    return statistics.median(taken)


def measure(size: str, chunk_bytes: int) -> dict[str, float]:
    """The parts of a step with this size of chunks."""
    torch.manual_seed(0)
    model = lm.GPT(lm.SIZES[size], 0.1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    state = TrainState(model=model, optimizer=optimizer)
    extras = state.capture({})
    retained = Retained.create(
        model, optimizer, alloc, elementwise=None, extras_bytes=len(extras), chunk_bytes=chunk_bytes
    )
    transaction = Transaction(retained, alloc, lambda: None, None)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)

    def step() -> None:
        number = retained.header.position.step
        transaction.save_gradients()
        retained.header.position = Position(number, Phase.VOTE)
        fresh = transaction.run()
        if fresh:
            retained.settle(fresh, number + 1, alloc, chunk_bytes, buckets=False)
        retained.header.position = Position(number + 1, Phase.COMPUTE)

    step()
    return {
        "raw": median_ms(lambda: raw_step(optimizer)),
        "transaction": median_ms(step),
        "gradients": median_ms(transaction.save_gradients),
        "pre-images": median_ms(lambda: [retained.keep(chunk.ranges) for chunk in retained.manifest.chunks]),
        "extras": median_ms(lambda: state.capture({})),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(lm.SIZES), default="small")
    parser.add_argument("--chunk-bytes", type=int, nargs="+", default=[1 << 18, 1 << 20, 1 << 24])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for _ in range(args.rounds):
        for chunk_bytes in args.chunk_bytes:
            parts = measure(args.size, chunk_bytes)
            ratio = parts["transaction"] / parts["raw"]
            text = ", ".join(f"{name} {value:.2f}" for name, value in parts.items())
            print(f"chunks of {chunk_bytes >> 10} KiB: {text}; transaction / raw {ratio:.2f}")


if __name__ == "__main__":
    main()
