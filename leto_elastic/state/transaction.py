"""The update of one step, chunk by chunk, so that a SIGKILL at any instruction of it loses nothing.

    VOTE(s)      gradients and the pending extras are in the segments
    UPDATE(s,i)  chunks before i are done, chunk i is untouched
    UPDATE(s,i)+ `torn`: the pre-image of chunk i is whole, the chunk itself may be half updated
    COMPUTE(s+1) by one store, when everything of step s is done

Whoever finds UPDATE(s,i) torn puts the pre-image back and goes on with chunk i; the gradients of *every* rank are whole
by then, since nobody stores UPDATE before the vote. Elementwise optimizers are stepped on slices of their parameter
groups, which gives the same bits as one whole step.

Some parameters cannot be part of a chunk that is ever called done before the commit: those updated for the first time
(their new optimizer tensors lie in the process's own memory until the commit adopts them) and all parameters of an
optimizer that couples them (LBFGS, Muon...). They form the *tail*: kept whole, updated last, torn until the commit.
Before the first commit there is no undo segment, and the job is not protected.

When the header's `target` names the step, the pre-images go to a snapshot buffer instead of the undo segment, at their
places in the stream, so that the buffer holds the whole W(s) afterwards; see `snapshot`. Such an update has no new
parameters: the layout would change at its commit.

Rejected: a second copy of the whole state (twice the memory); a log of changes (the update touches every byte).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from leto_elastic.errors import StateError
from leto_elastic.state import snapshot
from leto_elastic.state.header import Phase
from leto_elastic.state.model import like, local
from leto_elastic.state.retained import Alloc, Retained

Torn = Callable[[int, int], None]
"""Called with (chunk, chunks) while a chunk is half updated; only fault plans need it."""


def raw_step(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()` of its class, without the hooks around it."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    step(optimizer)


def step_slice(optimizer: torch.optim.Optimizer, group: int, params: Sequence[torch.Tensor]) -> None:
    """Step some parameters of one group as if there were no others."""
    groups = optimizer.param_groups
    chosen = groups[group]
    whole = chosen["params"]
    try:
        chosen["params"] = list(params)
        optimizer.param_groups = [chosen]
        raw_step(optimizer)
    finally:
        chosen["params"] = whole
        optimizer.param_groups = groups


class Transaction:
    """The update of a trainer's steps.

    Args:
        retained: its segments.
        alloc: for parameters that turn up late.
        publish: sends the manifest to the agent.
        torn: see `Torn`; None when no fault plan asks for it.
    """

    def __init__(self, retained: Retained, alloc: Alloc, publish: Callable[[], None], torn: Torn | None) -> None:
        self._retained = retained
        self._alloc = alloc
        self._publish = publish
        self._torn = torn
        self._tail_done = -1

    def save_gradients(self, *, apply: bool = True) -> None:
        """Copy all gradients to their segment (none, unless `apply`). Raises StateError for one that cannot be kept."""
        r = self._retained
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for index, target in enumerate(r.gradients):
            grad = r.sites[index].param.grad if apply else None
            r.gradient_mask[index] = grad is not None
            if grad is None:
                continue
            part = local(grad)
            if part.layout is not torch.strided or part.shape != target.shape:
                raise StateError(
                    f"the gradient of {r.sites[index].name} is {tuple(part.shape)} {part.layout}, "
                    f"its parameter {tuple(target.shape)}; only dense gradients of the parameter's layout can be kept"
                )
            targets.append(target)
            sources.append(part.detach())
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)
        if r.sums is not None:
            r.sums.saved(r.header.position.step)

    def load_gradients(self) -> None:
        """Give every parameter the gradient that is in the segment."""
        r = self._retained
        for index, kept in enumerate(r.gradients):
            param = r.sites[index].param
            param.grad = like(param, kept) if r.gradient_mask[index] else None

    def drop_gradients(self, *, check: bool) -> None:
        """Set all gradients to None. With `check`, raises StateError for one that is not zero."""
        r = self._retained
        for site in r.sites[: r.trained]:
            grad = site.param.grad
            if grad is None:
                continue
            if check and torch.count_nonzero(local(grad).detach()).item():
                raise StateError(
                    f"{site.name} still has a gradient at the end of step {r.header.position.step}: call "
                    "optimizer.zero_grad() after optimizer.step(); gradients are accumulated within one step, not over "
                    "several"
                )
            site.param.grad = None

    def fresh(self) -> list[int]:
        """Sites with a gradient in the segment that were never updated before."""
        settled = set(self._retained.manifest.settled)
        mask = self._retained.gradient_mask
        return [i for i in range(len(self._retained.gradients)) if mask[i] and i not in settled]

    def run(self) -> list[int]:
        """Do what is not done yet of the update; returns the sites that need `settle`. May be called again.

        Raises StateError outside of an update, and for a snapshot that new parameters would make useless.
        """
        r = self._retained
        position = r.header.position
        if position.phase not in (Phase.VOTE, Phase.UPDATE):
            raise StateError(f"nothing to update at {position}")
        chunks = r.manifest.chunks
        fresh = self.fresh()
        tail = bool(fresh) if r.elementwise else any(r.gradient_mask)
        total = len(chunks) + tail
        if fresh and snapshot.target_buffer(r.header, position.step) is not None:
            raise StateError(f"step {position.step} has new parameters and keeps a snapshot of the old layout")
        buffer = self._begin()
        position = r.header.position
        for index in range(position.chunk, len(chunks)):
            chunk = chunks[index]
            if position.torn:
                r.put_back(chunk.ranges, buffer)
            else:
                r.keep(chunk.ranges, buffer)
            r.header.position = position = position._replace(chunk=index, torn=True)
            params = [site.param for site in r.sites[chunk.start : chunk.stop]]
            if self._torn is not None:
                half = max(1, len(params) // 2)
                step_slice(r.optimizer, chunk.group, params[:half])
                self._torn(index, total)
                params = params[half:]
            if params:
                step_slice(r.optimizer, chunk.group, params)
            if r.sums is not None:
                r.sums.updated(index, position.step + 1)
            r.header.position = position = position._replace(chunk=index + 1, torn=False)
        if tail and self._tail_done != position.step:
            self._run_tail(fresh, total, buffer)
        return fresh

    def _begin(self) -> int | None:
        """Enter UPDATE; returns the buffer of the snapshot that this update keeps, None for none."""
        r = self._retained
        position = r.header.position
        if position.phase is Phase.VOTE:
            r.header.position = position = position._replace(phase=Phase.UPDATE, chunk=0, torn=False)
        buffer = snapshot.target_buffer(r.header, position.step)
        if buffer is not None and position.chunk == 0 and not position.torn:
            r.keep_rest(buffer, position.slot)
        return buffer

    def rewound(self) -> None:
        """The segments were put back to an earlier step, which will be updated again."""
        self._tail_done = -1

    def skip(self) -> list[int]:
        """A step without an update: as `run` when everything is done."""
        r = self._retained
        buffer = self._begin()
        if buffer is not None:  # until the next store nothing of it is needed to undo this update
            r.keep(r.manifest.stream, buffer)
        if r.sums is not None:
            r.sums.skipped(r.header.position.step + 1)
        r.header.position = r.header.position._replace(chunk=len(r.manifest.chunks))
        return []

    def _run_tail(self, fresh: Sequence[int], total: int, buffer: int | None) -> None:
        r = self._retained
        position = r.header.position
        ranges = r.tail_ranges(fresh)
        if position.torn:
            r.put_back(ranges, buffer)
        elif buffer is not None:  # all of it was kept at the beginning
            r.header.position = position._replace(torn=True)
        elif r.manifest.undo or r.manifest.version:
            if r.reserve_undo(sum(place.size for place in ranges), self._alloc):
                self._publish()
            r.keep(ranges, None)
            r.header.position = position._replace(torn=True)
        if self._torn is not None:
            self._torn(total - 1, total)
        if not r.elementwise:
            raw_step(r.optimizer)
        else:
            start = 0
            known = set(fresh)
            for group, size in enumerate(r.manifest.group_sizes):
                params = [r.sites[i].param for i in range(start, start + size) if i in known]
                if params:
                    step_slice(r.optimizer, group, params)
                start += size
        if r.sums is not None and not fresh:
            r.sums.updated(len(r.manifest.chunks), position.step + 1)
        self._tail_done = position.step
