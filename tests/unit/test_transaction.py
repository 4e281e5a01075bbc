"""The update of a step is killed at every point where that is possible, and finished by another process's view of it.

Segments are memfds of this process; a kill is a copy of their bytes at that instant, attached by a second model and
optimizer that know nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from leto_elastic.errors import ShadowUnfit, StateError
from leto_elastic.state.header import Phase, Position
from leto_elastic.state.layout import Manifest, decode, encode
from leto_elastic.state.retained import Retained
from leto_elastic.state.transaction import Transaction

Snapshot = tuple[Manifest, dict[str, bytes]]


class Segments:
    """What an agent does for one slot."""

    def __init__(self) -> None:
        self.fds: dict[str, tuple[int, int]] = {}

    def alloc(self, name: str, size: int) -> int:
        assert name not in self.fds
        fd = os.memfd_create(name)
        os.posix_fallocate(fd, 0, size)
        self.fds[name] = (fd, size)
        return fd

    def copy(self) -> dict[str, bytes]:
        return {name: os.pread(fd, size, 0) for name, (fd, size) in self.fds.items()}

    @classmethod
    def of(cls, content: dict[str, bytes]) -> Segments:
        self = cls()
        for name, data in content.items():
            os.pwrite(self.alloc(name, len(data)), data, 0)
        return self

    def close(self) -> None:
        for fd, _ in self.fds.values():
            os.close(fd)


@pytest.fixture
def segments() -> Iterator[Callable[..., Segments]]:
    made: list[Segments] = []

    def make(content: dict[str, bytes] | None = None) -> Segments:
        made.append(Segments() if content is None else Segments.of(content))
        return made[-1]

    yield make
    for one in made:
        one.close()


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 8))
    model.register_buffer("seen", torch.zeros(3))
    return model


class Coupled(torch.optim.Optimizer):
    """Every parameter's update depends on all of them: never to be done in chunks."""

    def __init__(self, params: object, lr: float) -> None:
        super().__init__(params, {"lr": lr})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = sum(p.grad.norm() + p.norm() for p in params)
        for p in params:
            state = self.state[p]
            state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
            p.sub_(state["mean"] * self.param_groups[0]["lr"] / norm)


OPTIMIZERS: dict[str, Callable[[object], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adamw-fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, 1e-2),
    "sgd-momentum": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2),
    "coupled": lambda p: Coupled(p, 1e-2),
}


def groups(model: nn.Module) -> list[dict[str, object]]:
    params = list(model.parameters())
    return [{"params": params[:4], "lr": 3e-3}, {"params": params[4:]}]


def gradients(model: nn.Module, step: int, late: bool) -> None:
    """Gradients of a step; with `late`, the last parameter has none before step 3."""
    g = torch.Generator().manual_seed(step)
    for i, p in enumerate(model.parameters()):
        grad = torch.randn(p.shape, generator=g)
        p.grad = None if late and step < 3 and i == 5 else grad


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors = [p.detach() for p in model.parameters()]
    for p in model.parameters():
        tensors += [v for v in optimizer.state.get(p, {}).values() if isinstance(v, torch.Tensor)]
    return [t.clone() for t in tensors]


def one_step(retained: Retained, transaction: Transaction, step: int, segments: Segments) -> None:
    """What the runner does, without the extras."""
    transaction.save_gradients()
    retained.header.position = Position(step, Phase.VOTE)
    finish(retained, transaction, step, segments)


def finish(retained: Retained, transaction: Transaction, step: int, segments: Segments) -> None:
    fresh = transaction.run()
    if fresh or step == 0:
        retained.settle(fresh, step + 1, segments.alloc, 16384, buckets=False)
    retained.header.position = Position(step + 1, Phase.COMPUTE)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_killed_anywhere_in_the_update_then_rolled_forward(
    name: str, late: bool, segments: Callable[..., Segments]
) -> None:
    steps = 5
    plain = build()
    reference = OPTIMIZERS[name](groups(plain))
    expected: list[list[torch.Tensor]] = []
    for step in range(steps):
        gradients(plain, step, late)
        reference.step()
        expected.append(state_of(plain, reference))

    own = segments()
    model = build()
    optimizer = OPTIMIZERS[name](groups(model))
    elementwise = None
    retained = Retained.create(
        model, optimizer, own.alloc, elementwise=elementwise, extras_bytes=100, chunk_bytes=16384
    )
    published: list[bytes] = []
    kills: list[tuple[int, int, Snapshot]] = []
    step = 0

    def torn(chunk: int, chunks: int) -> None:
        if published:  # before the first commit nothing is protected
            kills.append((step, chunk, (decode(published[-1]), own.copy())))

    transaction = Transaction(retained, own.alloc, lambda: published.append(encode(retained.manifest)), torn)
    for step in range(steps):
        gradients(model, step, late)
        one_step(retained, transaction, step, own)
        published.append(encode(retained.manifest))
        for got, want in zip(state_of(model, optimizer), expected[step], strict=True):
            assert torch.equal(got, want)

    assert retained.elementwise == (name != "coupled")
    assert len(retained.manifest.chunks) == (0 if name == "coupled" else len(retained.manifest.chunks)) != 1
    assert len({(s, c) for s, c, _ in kills}) == len(kills) >= steps - 1
    for killed, _, (manifest, content) in kills:
        theirs = segments(content)
        other = build()
        with torch.no_grad():
            for p in other.parameters():
                p.fill_(7.0)
        stand_in = OPTIMIZERS[name](groups(other))
        gradients(other, 0, late)
        stand_in.step()  # rehearsed
        taken = Retained.attach(other, stand_in, manifest, theirs.fds, elementwise=elementwise)
        assert taken.header.position.step == killed
        assert taken.header.position.phase is Phase.UPDATE
        assert taken.header.position.torn
        resumed = Transaction(taken, theirs.alloc, lambda: None, None)
        resumed.load_gradients()
        finish(taken, resumed, killed, theirs)
        for got, want in zip(state_of(other, stand_in), expected[killed], strict=True):
            assert torch.equal(got, want)


def test_a_shadow_that_built_something_else_is_unfit(segments: Callable[..., Segments]) -> None:
    own = segments()
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    retained = Retained.create(model, optimizer, own.alloc, elementwise=None, extras_bytes=100, chunk_bytes=16384)
    other = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 9))
    with pytest.raises(ShadowUnfit, match=r"4\.weight is \(9, 96\)"):
        Retained.attach(other, torch.optim.AdamW(other.parameters()), retained.manifest, own.fds, elementwise=None)
    other = build()
    split = [{"params": list(other.parameters())[:2]}, {"params": list(other.parameters())[2:]}]
    with pytest.raises(ShadowUnfit, match=r"groups of \[2, 4\] parameters, the trainer has \[6\]"):
        Retained.attach(other, torch.optim.AdamW(split), retained.manifest, own.fds, elementwise=None)


def test_sparse_gradients_are_refused(segments: Callable[..., Segments]) -> None:
    own = segments()
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    retained = Retained.create(model, optimizer, own.alloc, elementwise=None, extras_bytes=100, chunk_bytes=16384)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(StateError, match="only dense gradients"):
        Transaction(retained, own.alloc, lambda: None, None).save_gradients()


def test_channels_last_parameters_keep_their_layout(segments: Callable[..., Segments]) -> None:
    own = segments()
    model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    stride, values = model.weight.stride(), model.weight.detach().clone()
    Retained.create(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        own.alloc,
        elementwise=None,
        extras_bytes=100,
        chunk_bytes=16384,
    )
    assert model.weight.stride() == stride
    assert torch.equal(model.weight, values)
