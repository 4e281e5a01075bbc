"""What `train_lm.py` and `train_lm_plain.py` share: a byte-level GPT, its data, a journal and a digest.

Nothing here is about fault tolerance; the two scripts differ in five lines and this file is the same for both.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import os
import random
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

Batch = tuple[Tensor, Tensor]  # sample ids [batch] int64, tokens [batch, sequence + 1] int64


class Size(NamedTuple):
    """Shape of a model; `batch` is per rank and micro-step."""

    width: int
    layers: int
    heads: int
    sequence: int
    batch: int
    lr: float


SIZES = {
    "tiny": Size(width=128, layers=2, heads=4, sequence=64, batch=4, lr=3e-3),  # 0.5 M parameters
    "small": Size(width=256, layers=4, heads=4, sequence=64, batch=4, lr=1e-3),  # 3.3 M
    "base": Size(width=512, layers=8, heads=8, sequence=128, batch=4, lr=6e-4),  # 25 M
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on the sources of Python's standard library.")
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--size", choices=list(SIZES), default="tiny")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--grad-accum", type=int, default=1, help="micro-steps per optimizer step")
    parser.add_argument("--data", type=Path, help="a text file or a directory of *.py (default: the standard library)")
    parser.add_argument("--run-dir", type=Path, help="where samples.rank<R>.txt goes (default: leto's, or .leto/plain)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


# ---- model


class Block(nn.Module):
    """Pre-norm attention and feed-forward of one layer."""

    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1 = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.norm2 = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Bytes in, the mean loss of the next byte out."""

    def __init__(self, size: Size, dropout: float = 0.1) -> None:
        super().__init__()
        self.token = nn.Embedding(256, size.width)
        self.position = nn.Embedding(size.sequence, size.width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(size, dropout) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.dropout(self.token(inputs) + self.position.weight[: inputs.shape[1]])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def device() -> torch.device:
    """This rank's accelerator, or the CPU."""
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")


def build_model(args: argparse.Namespace) -> nn.Module:
    """The same weights on every rank, wrapped; afterwards every rank has random numbers of its own."""
    torch.manual_seed(args.seed)
    model: nn.Module = GPT(SIZES[args.size]).to(device())
    if args.parallel == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh(device().type, (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    torch.manual_seed(args.seed + 1 + dist.get_rank())
    random.seed(args.seed + 1 + dist.get_rank())
    return model


def build_optimizer(
    model: nn.Module, args: argparse.Namespace
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW, its rate warmed up over a few steps and then lowered along a cosine."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=SIZES[args.size].lr, weight_decay=0.1)
    warmup = max(1, min(20, args.steps // 10))

    def factor(step: int) -> float:
        progress = min(1.0, max(0, step - warmup) / max(1, args.steps - warmup))
        return min(1.0, (step + 1) / warmup) * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def backward(model: nn.Module, tokens: Tensor, micro_steps: int) -> float:
    """Forward and backward of one batch in micro-steps; gradients are reduced over the ranks in the last one only."""
    total = torch.zeros((), device=device())
    for index, part in enumerate(tokens.to(device()).chunk(micro_steps)):
        last = index == micro_steps - 1
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        elif isinstance(model, DistributedDataParallel) and not last:
            with model.no_sync():
                total += _backward_one(model, part, micro_steps)
            continue
        total += _backward_one(model, part, micro_steps)
    return total.item()


def _backward_one(model: nn.Module, tokens: Tensor, micro_steps: int) -> Tensor:
    loss = model(tokens) / micro_steps
    loss.backward()
    return loss.detach()


# ---- data


class Text(Dataset[tuple[int, Tensor]]):
    """Windows of a text as bytes. A sample's id is its offset in the text."""

    def __init__(self, path: Path | None, sequence: int, limit: int = 8 << 20) -> None:
        path = path or Path(sysconfig.get_path("stdlib"))
        files = sorted(f for f in path.rglob("*.py") if "site-packages" not in f.parts) if path.is_dir() else [path]
        text = bytearray()
        for file in files:
            text += file.read_bytes()
            if len(text) >= limit:
                break
        if len(text) <= sequence:
            raise SystemExit(f"{path} holds {len(text)} bytes of text; more than {sequence} are needed")
        self.bytes = torch.frombuffer(text[:limit], dtype=torch.uint8)
        self.sequence = sequence

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.sequence

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        offset = index * self.sequence
        return offset, self.bytes[offset : offset + self.sequence + 1].long()


def build_loader(args: argparse.Namespace) -> DataLoader[tuple[int, Tensor]]:
    """This rank's batches; the order of an epoch depends on the seed and the epoch only."""
    size = SIZES[args.size]
    text = Text(args.data, size.sequence)
    sampler: DistributedSampler[tuple[int, Tensor]] = DistributedSampler(text, seed=args.seed, drop_last=True)
    batch = size.batch * args.grad_accum
    if len(sampler) < batch:
        raise SystemExit(f"{len(text)} samples over {dist.get_world_size()} ranks do not fill one batch of {batch}")
    return DataLoader(text, batch_size=batch, sampler=sampler, drop_last=True)


class StepLike(Protocol):
    """What the scripts use of a step, ours or leto's."""

    @property
    def number(self) -> int: ...
    @property
    def batch(self) -> Batch: ...
    @property
    def rehearsal(self) -> bool: ...


@dataclass(frozen=True)
class Step:
    """A step of the plain script."""

    number: int
    batch: Batch
    rehearsal: bool = False


def steps(loader: DataLoader[tuple[int, Tensor]], until: int, start: int = 0) -> Iterator[Step]:
    """Steps `start` to `until - 1`, over as many epochs as that takes."""
    number = 0
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            if number >= start:
                yield Step(number, batch)
            number += 1
            if number >= until:
                return


# ---- what a run says about itself


class Journal:
    """Progress on the terminal, and which samples each step used, one line a step in `samples.rank<R>.txt`.

    A step's line is written when the next step begins, for only then is the step certain to be over; a step that is
    begun twice is written once. With `LM_STEP_TIMES=DIR` each finished step adds a line to `DIR/steps.rank<R>.txt`:
    step, begin and end (monotonic seconds), process id. The benchmarks read that.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank = dist.get_rank()
        self.pending: tuple[int, list[int]] | None = None
        self.samples: Path | None = None
        self.written = -1
        self.times: int | None = None
        self.began = 0.0
        self.loss = math.nan
        self.bar: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"pending": self.pending}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.pending = state["pending"]

    def begin(self, step: StepLike, ids: Tensor) -> None:
        """First thing in a step."""
        if step.rehearsal:
            return
        if self.samples is None:
            self._open(step)
        if self.pending is not None and self.pending[0] < step.number:
            self._write(*self.pending)
        self.pending = (step.number, ids.tolist())
        self.began = time.monotonic()

    def end(self, step: StepLike, loss: float) -> None:
        """Last thing in a step."""
        if step.rehearsal:
            return
        if self.times is not None:
            os.write(self.times, f"{step.number} {self.began:.6f} {time.monotonic():.6f} {os.getpid()}\n".encode())
        self.loss = loss if math.isnan(self.loss) else 0.9 * self.loss + 0.1 * loss
        if self.rank == 0:
            self._progress(step.number + 1)

    def close(self) -> None:
        """After the last step."""
        if self.pending is not None:
            self._write(*self.pending)
        if self.bar is not None:
            self.bar.close()

    def _open(self, step: StepLike) -> None:
        directory = self.args.run_dir or _run_dir(step)
        directory.mkdir(parents=True, exist_ok=True)
        self.samples = directory / f"samples.rank{self.rank}.txt"
        if step.number == 0:
            self.samples.write_bytes(b"")
        elif lines := self.samples.read_text().splitlines():
            self.written = int(lines[-1].split()[0])
        if where := os.environ.get("LM_STEP_TIMES"):
            path = Path(where) / f"steps.rank{self.rank}.txt"
            self.times = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def _write(self, number: int, ids: list[int]) -> None:
        if number > self.written and self.samples is not None:
            with self.samples.open("ab", buffering=0) as file:
                file.write(f"{number} {' '.join(map(str, ids))}\n".encode())
            self.written = number

    def _progress(self, done: int) -> None:
        if self.bar is None and os.isatty(2):
            try:
                from tqdm import tqdm
            except ImportError:
                pass
            else:
                tqdm.monitor_interval = 0
                self.bar = tqdm(total=self.args.steps, initial=done - 1, unit="step")
        if self.bar is not None:
            self.bar.set_postfix(loss=f"{self.loss:.3f}", refresh=False)
            self.bar.update(done - self.bar.n)
        elif done % max(1, self.args.steps // 10) == 0 or done == 1:
            say(f"step {done:5d}  loss {self.loss:.3f}")


def _run_dir(step: StepLike) -> Path:
    if isinstance(step, Step):
        return Path(".leto/plain")
    import leto_elastic

    return Path(leto_elastic.run_dir())


def say(line: str) -> None:
    """One line, in one write, so that ranks do not mix."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """sha256 over this rank's parameters, buffers, optimizer state and random number generators."""
    sha = hashlib.sha256()

    def add(name: str, value: object) -> None:
        sha.update(name.encode())
        if isinstance(value, Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            flat = local.detach().cpu().contiguous()
            sha.update(f"{flat.dtype}{tuple(flat.shape)}".encode())
            sha.update(flat.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            sha.update(repr(value).encode())

    for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
        add(name, value)
    for group in optimizer.param_groups:
        add("lr", group["lr"])
        for index, parameter in enumerate(group["params"]):
            for key, value in sorted(optimizer.state[parameter].items()):
                add(f"{index}.{key}", value)
    add("torch", torch.get_rng_state())
    if device().type == "cuda":
        add("cuda", torch.cuda.get_rng_state())
    add("python", random.getstate())
    return sha.hexdigest()


def finish(model: nn.Module, optimizer: torch.optim.Optimizer, journal: Journal) -> None:
    """The last lines of a run."""
    journal.close()
    say(f"digest rank={dist.get_rank()} step={journal.args.steps} sha256={digest(model, optimizer)}")
