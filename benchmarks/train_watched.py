"""The job that `detection.py` measures: a small GPT under leto that writes down instants, all in monotonic seconds.

In `<run dir>`: `steps.<rank>` has a line `step instant` for the start of every body, `aborts.<rank>` a line
`epoch instant` for every epoch whose end this rank was told of, and whose communicators it has ended. A file
`sleep.<rank>` makes that rank sleep for ever in its body, once, after it has written the instant into it.

With `--toggle N` signs of life are switched off and on every N steps, in all ranks at once, and `times.<rank>` has a
line `on seconds processor-seconds` for each step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from pathlib import Path

import torch.distributed as dist

import leto_elastic as leto
import lm
from leto_elastic.worker import session as sessions


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parallel", default="ddp")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--toggle", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1_000_000)
    args = parser.parse_args()
    args.seed, args.data, args.grad_accum = 0, None, 1
    leto.init()
    rank = dist.get_rank()
    directory = Path(leto.run_dir())
    session = sessions.current()
    abort = session.link.on_abort

    def aborted(epoch: int) -> None:
        abort(epoch)
        write(directory / f"aborts.{rank}", f"{epoch} {time.monotonic()}")

    session.link.on_abort = aborted
    loader = lm.build_loader(args)
    model = lm.build_model(args)
    optimizer, _ = lm.build_optimizer(model, args)
    state = leto.TrainState(model=model, optimizer=optimizer, data=loader)
    sleeper = directory / f"sleep.{rank}"
    asleep = directory / f"asleep.{rank}"
    watched = True
    before, used = time.monotonic(), time.process_time()
    for step in leto.steps(state, until=args.steps):
        if args.toggle and not leto.is_shadow() and step.number % args.toggle == 0:
            watched = toggle(session, step.number // args.toggle % 2 == 0)
            before, used = time.monotonic(), time.process_time()
        with step:
            if not args.toggle and not step.rehearsal:
                write(directory / f"steps.{rank}", f"{step.number} {time.monotonic()}")
                if sleeper.exists():
                    sleeper.rename(asleep)
                    write(asleep, str(time.monotonic()))
                    time.sleep(3600)
            lm.backward(model, step.batch[1], 1)
            optimizer.step()
            optimizer.zero_grad()
        if args.toggle and not step.rehearsal:
            now, cpu = time.monotonic(), time.process_time()
            write(directory / f"times.{rank}", f"{int(watched)} {now - before} {cpu - used}")
            before, used = time.monotonic(), time.process_time()
    dist.destroy_process_group()


def toggle(session: sessions.Session, on: bool) -> bool:
    """Signs of life on or off."""
    heartbeat = session.heartbeat
    assert heartbeat is not None
    header = heartbeat._header
    with contextlib.suppress(AttributeError):
        heartbeat.stop()
    if on:
        session.watched(header)
    return on


def write(path: Path, line: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, f"{line}\n".encode())
    os.close(fd)


if __name__ == "__main__":
    main()
