"""A small training job for the tests: everything that must come out bit-identical is in it.

Dropout (random numbers), BatchNorm (buffers that change in forward), a scheduler, gradient clipping, a counter,
shuffled data over several epochs. Prints `digest rank=R step=N sha256=HEX`, writes `samples.rank<R>.txt`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import select
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import leto_elastic as leto
from leto_elastic.testing import faults

WIDTH = 128


class Numbers(Dataset[Any]):
    """Sample i: its id, a vector made from it, a target."""

    def __init__(self, count: int, width: int) -> None:
        g = torch.Generator().manual_seed(5)
        self.x = torch.randn(count, width, generator=g)
        self.y = torch.randn(count, 8, generator=g)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, self.x[index], self.y[index]


class Samples:
    """One line of sample ids per committed step; what is noted in the body is written by the commit."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.noted: list[int] = []
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"noted": self.noted, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.noted, self.steps = state["noted"], state["steps"]

    def flush(self) -> None:
        """Raises RuntimeError when a step that is done once more has other samples than the first time."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        line = f"{self.steps} {' '.join(map(str, self.noted))}"
        if len(lines) <= self.steps:
            with self.path.open("a") as file:
                file.write(f"{line}\n")
        elif lines[self.steps] != line:
            raise RuntimeError(f"{self.path.name}: step {self.steps} had samples {lines[self.steps]!r}, now {line!r}")
        self.steps += 1


class Trouble:
    """What goes wrong in a step, on one rank or all, every time that it is run.

    bug, exit, leave, interrupt: NameError, SystemExit(3), SystemExit(0), KeyboardInterrupt, after the backward;
    nan: gradients that are not numbers; idle: no `optimizer.step()`; pass: nothing is done at all.
    """

    def __init__(self, text: str, rank: int) -> None:
        self.kind, who, step = text.split(":")
        self.step = int(step) if who in ("all", str(rank)) else -1

    def at(self, kind: str, step: Any) -> bool:
        return kind == self.kind and step.number == self.step and not step.rehearsal

    def strike(self, step: Any) -> None:
        raises: dict[str, BaseException] = {
            "bug": NameError("name 'lr' is not defined"),
            "exit": SystemExit(3),
            "leave": SystemExit(0),
            "interrupt": KeyboardInterrupt(),
        }
        if self.kind in raises and self.at(self.kind, step):
            raise raises[self.kind]


def build(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(1)
    width = WIDTH
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.1)]
    net = nn.Sequential(*layers, nn.Linear(width, 8))
    if args.parallel == "ddp":
        return DistributedDataParallel(net)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    sha = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, DTensor):
            value = value.to_local()
        if isinstance(value, torch.Tensor):
            value = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        sha.update(value if isinstance(value, bytes) else repr(value).encode())

    for name, tensor in model.state_dict().items():
        add(name)
        add(tensor)
    for group in optimizer.param_groups:
        add(sorted((k, v) for k, v in group.items() if k != "params"))
        for param in group["params"]:
            for key, value in sorted(optimizer.state[param].items()):
                add(key)
                add(value)
    add(torch.get_rng_state())
    add(random.getstate())
    add(np.random.get_state()[1].tobytes())
    return sha.hexdigest()


def hold(run_dir: str, count: int) -> None:
    """Go on when the shadows of all ranks, on all nodes, have been ready so often."""
    while True:
        lines = [line for path in Path(run_dir).glob("events*.jsonl") for line in path.read_text().splitlines()]
        events = [json.loads(line) for line in lines if line.endswith("}")]
        if sum(event["event"] == "shadow_ready" for event in events) >= count:
            return
        select.select([], [], [], 0.02)


def note(path: Path, step: int) -> None:
    """A line of `leto_elastic.testing.steplog`."""
    with path.open("a") as file:
        file.write(f"{step} {time.monotonic():.6f} {os.getpid()}\n")


class Slow:
    """Waits in a step until the gate exists: `pause` seconds, or as long as it takes ten steps before the last one."""

    def __init__(self, gate: Path, pause: float, steps: int) -> None:
        self.gate, self.pause, self.last = gate, pause, steps - 10

    def wait(self) -> None:
        if not self.gate.exists():
            select.select([], [], [], self.pause)

    def begin(self, number: int) -> None:
        self.wait()
        while number >= self.last and not self.gate.exists():
            select.select([], [], [], self.pause)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parallel", default="ddp")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--hold", default="3:4", help="STEP:COUNT, at STEP wait until COUNT shadows have been ready")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--evaluate", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.0, help="shortest seconds a step takes")
    parser.add_argument("--trouble", default="none:all:-1", help="KIND:RANK:STEP, see `Trouble`")
    parser.add_argument("--gate", type=Path, help="until it exists, steps have the pace in every phase, and no end")
    parser.add_argument("--times", action="store_true", help="write when each step was committed")
    args = parser.parse_args()

    leto.init()
    rank = dist.get_rank()
    faults.point("setup")
    model = build(args)
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)
    np.random.seed(100 + rank)
    if args.optimizer == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    else:
        optimizer = torch.optim.SGD(model.parameters(), 3e-2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    data = Numbers(32 * dist.get_world_size(), WIDTH)
    loader = DataLoader(data, 8 * args.accum, sampler=DistributedSampler(data, shuffle=True, seed=3), drop_last=True)
    samples = Samples(Path(leto.run_dir(), f"samples.rank{rank}.txt"))
    state = leto.TrainState(model=model, optimizer=optimizer, scheduler=scheduler, data=loader, samples=samples)
    state.each_step(samples.flush)
    if args.times:
        times = Path(leto.run_dir(), f"times.rank{rank}.txt")
        state.each_step(lambda: note(times, samples.steps - 1))
    slow = Slow(args.gate, args.pace / 3, args.steps) if args.gate else None
    hold_step, hold_count = map(int, args.hold.split(":"))

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            loss = model(torch.randn(4, WIDTH)).square().mean()
            faults.point("evaluation")
            dist.all_reduce(loss)
            model(torch.randn(4, WIDTH))
        print(f"evaluated rank={rank} step={samples.steps} loss={loss.item():.6f}\n", end="", flush=True)

    if args.evaluate:
        state.every(args.evaluate, evaluate)
    trouble = Trouble(args.trouble, rank)
    for step in leto.steps(state, until=args.steps):
        began = time.monotonic()
        with step:
            if step.number == hold_step and not step.rehearsal:
                hold(leto.run_dir(), hold_count)
            if trouble.at("pass", step):
                continue
            if not step.rehearsal:
                faults.point("body", step.number)
            if slow is not None and not step.rehearsal:
                slow.begin(step.number)
            ids, x, y = step.batch
            samples.noted = ids.tolist()
            if not step.rehearsal:
                random.random(), np.random.rand()
            for micro in range(args.accum):
                part = slice(micro * 8, micro * 8 + 8)
                last = micro == args.accum - 1
                if isinstance(model, FSDPModule):
                    model.set_requires_gradient_sync(last)
                alone = isinstance(model, DistributedDataParallel) and not last
                with model.no_sync() if alone else contextlib.nullcontext():
                    (model(x[part]) - y[part]).square().mean().backward()
                if not last and not step.rehearsal:
                    faults.point("micro", step.number)
            trouble.strike(step)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if trouble.at("nan", step):
                for param in model.parameters():
                    assert param.grad is not None
                    (param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad).fill_(float("nan"))
            if slow is not None and not step.rehearsal:
                slow.wait()
            if not trouble.at("idle", step):
                optimizer.step()
            optimizer.zero_grad()
            if slow is not None and not step.rehearsal:
                slow.wait()
            elif args.pace and not step.rehearsal:
                select.select([], [], [], max(0.0, began + args.pace - time.monotonic()))
    faults.point("after")
    print(f"digest rank={rank} step={args.steps} sha256={digest(model, optimizer)}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
