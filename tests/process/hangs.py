"""`train.py` with more in its body: an all-reduce in a group of its own, and what hangs or only takes long.

The point `body` of fault plans is there too. None of it changes what is learned: the outcome is that of `train.py`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import train
from torch import nn

import leto_elastic as leto
from leto_elastic.testing import faults

parser = argparse.ArgumentParser()
parser.add_argument("--skip", default="-1:0", help="RANK:STEP, leave the all-reduce out there, once")
parser.add_argument("--default", action="store_true", help="the all-reduce is one of the default group")
parser.add_argument("--first", type=float, default=0.0, help="seconds that step 0 takes")
parser.add_argument("--pause", default="-1:0", help="STEP:SECONDS, that rank 0 takes there with the watch paused")
parser.add_argument("--slow", default="", help="comma-separated steps that take longer than ...")
parser.add_argument("--pace", default="0:0", help="SECONDS:SECONDS of any other and of a slow step")
args, rest = parser.parse_known_args()
sys.argv[1:] = rest

slow = [int(step) for step in args.slow.split(",") if step]
usual, long = map(float, args.pace.split(":"))
skipper = tuple(map(int, args.skip.split(":")))
pause_step, pause_seconds = (float(part) for part in args.pause.split(":"))
now: list[Any] = []


def once(name: str) -> bool:
    try:
        os.close(os.open(Path(leto.run_dir(), name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def body(group: dist.ProcessGroup | None) -> None:
    (step,) = now
    rank = dist.get_rank()
    if step.rehearsal:
        return
    faults.point("inside", step.number)
    time.sleep(args.first if step.number == 0 else long if step.number in slow else usual)
    if step.number == pause_step and rank == 0:
        with leto.pause_watch():
            time.sleep(pause_seconds)
    if (rank, step.number) != skipper or not once("skipped"):
        dist.all_reduce(torch.zeros(3), group=group)


def build(arguments: argparse.Namespace) -> nn.Module:
    model = build_as_ever(arguments)
    group = None if args.default else dist.new_group()
    model.register_forward_pre_hook(lambda _module, _args: body(group))
    return model


def steps(state: leto.TrainState, *, until: int) -> Iterator[Any]:
    for step in steps_as_ever(state, until=until):
        now[:] = [step]
        yield step


def hold(run_dir: str, count: int) -> None:
    with leto.pause_watch():
        hold_as_ever(run_dir, count)


build_as_ever, steps_as_ever, hold_as_ever = train.build, leto.steps, train.hold
train.build, train.hold = build, hold
leto.steps = steps  # type: ignore[assignment]
train.main()
