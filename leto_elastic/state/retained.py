"""A trainer's state in segments that its agent owns.

Guarantee: at any instant, the segments hold all that a shadow needs to continue the job in place of the process that
wrote them, provided the first step has been committed. Parameters and optimizer tensors are there in place, gradients
are copied once a step; see `layout` for where, `extras` for the small rest and `header` for the position.

Two roles use this class. A trainer `create`s it before its first step and `settle`s the optimizer's tensors when they
have appeared; a shadow `attach`es what another process made.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from leto_elastic.errors import ShadowUnfit, StateError
from leto_elastic.state import layout, snapshot
from leto_elastic.state.arena import Arena, aligned, dense_stride, give_back_freed, rebase, span_bytes
from leto_elastic.state.extras import SLOTS, Extras, capacity_for
from leto_elastic.state.header import HEADER_BYTES, Header
from leto_elastic.state.layout import Manifest, Place, TensorSpec
from leto_elastic.state.model import Site, bucket_layout, like, local, sites
from leto_elastic.state.pack import dtype_of
from leto_elastic.state.sums import Checksum, Sums, bytes_needed

Alloc = Callable[[str, int], int]
"""(name, bytes) -> file descriptor of a zeroed segment; raises NotEnoughMemory."""

# Tensors of the size of the parameter that torch's optimizers keep; for the estimate of what a job will need.
_COPIES = {"SGD": 1, "Adagrad": 1, "Adadelta": 2, "RMSprop": 3, "ASGD": 1, "Rprop": 2}

_ROOM = 4  # extras that a snapshot buffer has room for, so that extras that grow do not move it

ELEMENTWISE = frozenset(
    {"Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)


class Retained:
    """The segments of one slot, mapped in this process."""

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, elementwise: bool | None) -> None:
        self.module = module
        self.optimizer = optimizer
        self.sites: list[Site] = sites(module, optimizer)
        self.arenas: dict[str, Arena] = {}
        self.header: Header
        self.extras: Extras
        self.manifest: Manifest
        self.gradients: list[torch.Tensor] = []
        self.gradient_mask: memoryview
        self.checksum: Checksum | None = None
        self.sums: Sums | None = None
        known = type(optimizer).__module__.startswith("torch.optim") and type(optimizer).__name__ in ELEMENTWISE
        self.elementwise = known if elementwise is None else elementwise

    @property
    def trained(self) -> int:
        """How many sites, from the first, belong to the optimizer."""
        return sum(len(group["params"]) for group in self.optimizer.param_groups)

    # ---- a trainer's side

    @classmethod
    def create(
        cls,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        alloc: Alloc,
        *,
        elementwise: bool | None,
        extras_bytes: int,
        chunk_bytes: int,
        snapshots: int = 0,
        replicas: Sequence[int] = (),
        checksum: Checksum | None = None,
    ) -> Retained:
        """Allocate the segments and move parameters onto them, and what the optimizer has already.

        Args:
            extras_bytes: size of the first extras.
            chunk_bytes: of parameters and optimizer tensors that are updated and undone together.
            snapshots: how many snapshot buffers to keep, 0 to 2; 0: no protection against lost memory.
            replicas: see `Manifest.replicas`.
            checksum: to keep checksums by, see `sums`.

        Raises NotEnoughMemory or StateError, nothing moved.
        """
        self = cls(module, optimizer, elementwise)
        self.checksum = checksum
        weights, weight_bytes = _place(
            "weights",
            [(i, "", s.shape, s.stride, s.dtype, s.reserve * s.dtype.itemsize) for i, s in enumerate(self.sites)],
            0,
        )
        named = [(n, b) for n, b in module.named_buffers() if b.layout is torch.strided]
        buffers, weight_bytes = _place(
            "weights", [(-1, n, b.shape, dense_stride(local(b)), b.dtype, 0) for n, b in named], weight_bytes
        )
        trained = self.trained
        grads, grad_bytes = _place(
            "grads",
            [(i, "", s.shape, s.stride, s.dtype, 0) for i, s in enumerate(self.sites[:trained])],
            aligned(trained),
        )
        capacity = capacity_for(extras_bytes)
        names = [f"snapshot.{index}" for index in range(snapshots)]
        estimate = self._optimizer_estimate()
        header = alloc("header", HEADER_BYTES)
        sizes = {"weights": weight_bytes, "grads": grad_bytes, "extras": SLOTS * capacity}
        if estimate:
            sizes["optim"] = estimate
        sizes.update(dict.fromkeys(names, weight_bytes + aligned(estimate) + _ROOM * capacity))
        for name, size in sizes.items():  # all of them before anything is moved
            self.arenas[name] = Arena(name, alloc(name, max(size, 64)), max(size, 64))
        self.header = Header(header)
        self.header.initialise()
        self.extras = Extras(self.arenas["extras"], capacity)
        with torch.no_grad():
            for spec, site in zip(weights, self.sites, strict=True):
                self._view(spec).copy_(site.data)
                site.attach(self.arenas["weights"], spec.place.offset)
            give_back_freed()
            for spec, (_, buffer) in zip(buffers, named, strict=True):
                self._view(spec).copy_(local(buffer))
        self.manifest = Manifest(
            format=layout.VERSION,
            version=0,
            since=0,
            names=[site.name for site in self.sites],
            group_sizes=[len(group["params"]) for group in optimizer.param_groups],
            weights=weights,
            buffers=buffers,
            optim=[],
            grads=grads,
            chunks=[],
            settled=[],
            elementwise=self.elementwise,
            extras="extras",
            extras_capacity=capacity,
            undo="",
            buckets="",
            **self._segments(),
            snapshots=names,
            replicas=list(replicas),
        )
        self._map_gradients()
        early = [i for i, site in enumerate(self.sites[:trained]) if self.optimizer.state.get(site.param)]
        if early:  # Adagrad, or a loaded checkpoint
            self.settle(early, 0, alloc, chunk_bytes, buckets=False)
        return self

    def _optimizer_estimate(self) -> int:
        total = 0
        start = 0
        for group in self.optimizer.param_groups:
            copies = _COPIES.get(type(self.optimizer).__name__, 2)
            if type(self.optimizer).__name__ == "SGD" and not group.get("momentum"):
                copies = 0
            copies += bool(group.get("amsgrad"))
            for site in self.sites[start : start + len(group["params"])]:
                if site.param.requires_grad:
                    total += copies * aligned(span_bytes(site.shape, site.stride, site.dtype)) + 64
            start += len(group["params"])
        return total

    def settle(self, fresh: Sequence[int], since: int, alloc: Alloc, chunk_bytes: int, *, buckets: bool) -> None:
        """Adopt the optimizer's tensors of sites that have just been updated for the first time.

        Afterwards the manifest is one version newer and holds from step `since`; the one before is kept inside it.
        `buckets`: DDP's bucket layout is final (it changes before the second step).
        """
        old = self.manifest
        rows = []
        found: list[torch.Tensor] = []
        for index in fresh:
            param = self.sites[index].param
            for key, value in self.optimizer.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    part = local(value)
                    if part.device.type != "cpu":
                        raise StateError(f"optimizer tensor {key} of {self.sites[index].name} is on {part.device}")
                    rows.append((index, str(key), tuple(part.shape), dense_stride(part), part.dtype, 0))
                    found.append(value)
        start = max(
            (aligned(s.place.offset + s.place.size) for s in old.optim if s.place.segment == "optim"), default=0
        )
        name = "optim"
        specs, end = _place(name, rows, start)
        if rows and end > (self.arenas["optim"].size if "optim" in self.arenas else 0):
            name = "optim" if "optim" not in self.arenas else f"optim.{old.version}"
            specs, end = _place(name, rows, 0)
            self.arenas[name] = Arena(name, alloc(name, end), end)
        with torch.no_grad():
            for spec, value in zip(specs, found, strict=True):
                view = self._view(spec)
                view.copy_(local(value))
                rebase(local(value), view)
            give_back_freed()
        dressed = [local(value) is not value for value in found]
        optim = [
            *old.optim,
            *(
                TensorSpec(s.param, s.key, s.place, s.shape, s.stride, s.dtype, d)
                for s, d in zip(specs, dressed, strict=True)
            ),
        ]
        settled = sorted({*old.settled, *fresh})
        trained = old.weights[: self.trained]
        if self.elementwise:
            chunks = layout.plan_chunks(old.group_sizes, [*trained, *optim], settled, chunk_bytes)
            undo_bytes = max((chunk.size for chunk in chunks), default=0)
        else:
            chunks = []
            undo_bytes = sum(place.size for place in layout.merge(s.place for s in [*trained, *optim]))
        undo = old.undo
        if undo_bytes and (not undo or self.arenas[undo].size < undo_bytes):
            undo = f"undo.{old.version}" if undo else "undo"
            self.arenas[undo] = Arena(undo, alloc(undo, undo_bytes), undo_bytes)
        sums = ""
        if self.checksum is not None:
            sums, size = f"sums.{old.version}", bytes_needed(len(chunks))
            self.arenas[sums] = Arena(sums, alloc(sums, size), size)
        stream = snapshot.stream_of([*old.weights, *optim]) if old.snapshots else []
        snapshots = self._fit_snapshots(stream, old.extras_capacity, alloc)
        self.manifest = msgspec.structs.replace(
            old,
            version=old.version + 1,
            since=since,
            optim=optim,
            chunks=chunks,
            settled=settled,
            undo=undo,
            buckets=bucket_layout(self.module) if buckets else "",
            stream=stream,
            snapshots=snapshots,
            sums=sums,
            previous=msgspec.structs.replace(old, previous=None) if old.version else None,
            **self._segments(),
        )
        self._map_sums()
        if self.sums is not None:
            self.sums.settle(since)

    def _segments(self) -> dict[str, Any]:
        sizes = {"header": HEADER_BYTES, **{name: arena.size for name, arena in self.arenas.items()}}
        return {"segments": list(sizes), "sizes": list(sizes.values())}

    def _fit_snapshots(self, stream: Sequence[Place], capacity: int, alloc: Alloc) -> list[str]:
        """The segments of the snapshot buffers, moved with their content to larger ones if need be."""
        size = aligned(sum(place.size for place in stream)) + capacity
        names = []
        for index, name in enumerate(self.manifest.snapshots):
            small = self.arenas[name]
            if small.size < size:
                name = f"snapshot.{index}.{self.manifest.version}"
                roomy = size + (_ROOM - 1) * capacity
                self.arenas[name] = Arena(name, alloc(name, roomy), roomy)
                small.copy_out(0, small.size, self.arenas[name], 0)
            names.append(name)
        return names

    def reserve_undo(self, size: int, alloc: Alloc) -> bool:
        """Make room for a pre-image of `size` bytes. True when the manifest changed and must be published first."""
        undo = self.manifest.undo
        if undo and self.arenas[undo].size >= size:
            return False
        name = f"undo.{self.manifest.version}"
        self.arenas[name] = Arena(name, alloc(name, size), size)
        self._revise(undo=name)
        return True

    def grow_extras(self, size: int, alloc: Alloc) -> None:
        """Move the extras to a larger segment; the manifest must be published before anything new is written."""
        capacity = capacity_for(size)
        snapshots = self._fit_snapshots(self.manifest.stream, capacity, alloc)
        name = f"extras.{self.manifest.version}"
        self.arenas[name] = Arena(name, alloc(name, SLOTS * capacity), SLOTS * capacity)
        larger = Extras(self.arenas[name], capacity)
        self.extras.copy_to(larger)
        self.extras = larger
        self._revise(extras=name, extras_capacity=capacity, snapshots=snapshots)

    def refresh_buckets(self) -> bool:
        """Note DDP's bucket layout again; it is final only after some steps. True when it changed."""
        now = bucket_layout(self.module)
        if now == self.manifest.buckets:
            return False
        self._revise(buckets=now)
        return True

    def _revise(self, **changes: Any) -> None:
        version = self.manifest.version + 1
        self.manifest = msgspec.structs.replace(self.manifest, version=version, **changes, **self._segments())
        self._map_sums()

    # ---- a shadow's side

    @classmethod
    def attach(
        cls,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        manifest: Manifest,
        segments: dict[str, tuple[int, int]],
        *,
        elementwise: bool | None,
        checksum: Checksum | None = None,
    ) -> Retained:
        """Let the model and the optimizer of this process live on segments that another process made.

        Args:
            segments: name -> (file descriptor, bytes). The descriptors are not closed.
            checksum: as for `create`.

        Raises:
            ShadowUnfit: this process built something else than the manifest describes.
        """
        self = cls(module, optimizer, elementwise)
        self.header = Header(segments["header"][0])
        if not self.header.valid:
            raise StateError("the header segment was never initialised")
        current = manifest.at(self.header.position.step)
        if current is None:
            raise StateError("the state was not protected yet when its trainer ended")
        self.manifest = current
        self._check(current)
        self.arenas = {n: Arena(n, fd, size) for n, (fd, size) in segments.items() if n != "header"}
        with torch.no_grad():
            for spec, site in zip(current.weights, self.sites, strict=True):
                site.attach(self.arenas[spec.place.segment], spec.place.offset)
            buffers = dict(module.named_buffers())
            for spec in current.buffers:
                local(buffers[spec.key]).copy_(self._view(spec))
            self._attach_optimizer(current)
        give_back_freed()
        self.extras = Extras(self.arenas[current.extras], current.extras_capacity)
        self._map_gradients()
        self.checksum = checksum
        self._map_sums()
        return self

    def _attach_optimizer(self, manifest: Manifest) -> None:
        kept: dict[int, set[str]] = {}
        for spec in manifest.optim:
            param = self.sites[spec.param].param
            state = self.optimizer.state[param]
            view = self._view(spec)
            own = state.get(spec.key)
            if isinstance(own, torch.Tensor) and local(own).dtype == view.dtype:
                rebase(local(own), view)
            else:
                state[spec.key] = like(param, view) if spec.dressed else view
            kept.setdefault(spec.param, set()).add(spec.key)
        for index, site in enumerate(self.sites[: self.trained]):
            if index not in kept and site.param in self.optimizer.state:
                tensors = [k for k, v in self.optimizer.state[site.param].items() if isinstance(v, torch.Tensor)]
                if index not in manifest.settled or tensors:
                    del self.optimizer.state[site.param]

    def _check(self, manifest: Manifest) -> None:
        if manifest.format != layout.VERSION:
            raise ShadowUnfit(f"manifest format {manifest.format}, this version reads {layout.VERSION}")
        names = [site.name for site in self.sites]
        if names != manifest.names:
            odd = sorted(set(names) ^ set(manifest.names))[:4]
            raise ShadowUnfit(
                f"built other parameters than its trainer (differing or in another order: {odd or names[:4]})"
            )
        sizes = [len(group["params"]) for group in self.optimizer.param_groups]
        if sizes != manifest.group_sizes:
            raise ShadowUnfit(f"optimizer groups of {sizes} parameters, the trainer has {manifest.group_sizes}")
        for site, spec in zip(self.sites, manifest.weights, strict=True):
            if list(site.shape) != spec.shape or str(site.dtype) != spec.dtype:
                raise ShadowUnfit(
                    f"{site.name} is {site.shape} {site.dtype}, the trainer's is {tuple(spec.shape)} {spec.dtype}"
                )
        mine = bucket_layout(self.module)
        if manifest.buckets and mine != manifest.buckets:
            raise ShadowUnfit(f"DDP bucket layout is {mine}, the trainer's is {manifest.buckets}")

    # ---- both

    def _view(self, spec: TensorSpec) -> torch.Tensor:
        return self.arenas[spec.place.segment].view(spec.place.offset, spec.shape, spec.stride, dtype_of(spec.dtype))

    def _map_gradients(self) -> None:
        self.gradients = [self._view(spec) for spec in self.manifest.grads]
        self.gradient_mask = self.arenas["grads"].bytes(0, max(len(self.gradients), 1))

    def _map_sums(self) -> None:
        if self.checksum is not None and self.manifest.sums:
            self.sums = Sums(self.manifest, self.arenas, self.checksum)

    def tail_ranges(self, fresh: Sequence[int]) -> list[Place]:
        """What must be kept before parameters outside the chunks are updated (all of it for a coupled optimizer)."""
        specs = self.manifest.weights[: self.trained]
        if self.elementwise:
            return layout.merge(specs[index].place for index in fresh)
        return layout.merge(spec.place for spec in [*specs, *self.manifest.optim])

    def keep(self, ranges: Sequence[Place], buffer: int | None) -> None:
        """Copy ranges to the undo segment, or to their places in a snapshot buffer."""
        target, kept = self._kept(ranges, buffer)
        for offset, place in kept:
            self.arenas[place.segment].copy_out(place.offset, place.size, target, offset)

    def put_back(self, ranges: Sequence[Place], buffer: int | None) -> None:
        """Copy ranges back to where `keep` took them from."""
        source, kept = self._kept(ranges, buffer)
        for offset, place in kept:
            source.copy_out(offset, place.size, self.arenas[place.segment], place.offset)

    def _kept(self, ranges: Sequence[Place], buffer: int | None) -> tuple[Arena, list[snapshot.Kept]]:
        if buffer is not None:
            return self.arenas[self.manifest.snapshots[buffer]], snapshot.kept(self.manifest, ranges)
        ends = itertools.accumulate((place.size for place in ranges), initial=0)
        return self.arenas[self.manifest.undo], list(zip(ends, ranges, strict=False))

    def keep_rest(self, buffer: int, slot: int) -> None:
        """Copy to a snapshot buffer what no chunk has (all of it for a coupled optimizer), and X from its slot."""
        target = self.arenas[self.manifest.snapshots[buffer]]
        touched = [place for chunk in self.manifest.chunks for place in chunk.ranges]
        for offset, place in snapshot.still_ranges(self.manifest, touched):
            self.arenas[place.segment].copy_out(place.offset, place.size, target, offset)
        self.extras.copy_slot(slot, target, snapshot.extras_at(self.manifest))


_Row = tuple[int, str, Sequence[int], Sequence[int], torch.dtype, int]


def _place(segment: str, rows: Sequence[_Row], offset: int) -> tuple[list[TensorSpec], int]:
    specs = []
    for param, key, shape, stride, dtype, reserve in rows:
        size = max(span_bytes(shape, stride, dtype), reserve)
        specs.append(TensorSpec(param, key, Place(segment, offset, size), list(shape), list(stride), str(dtype)))
        offset = aligned(offset + size)
    return specs, offset
