"""Where the tensors of a model and its optimizer are, and how to put them somewhere else without anyone noticing.

`Site`s hide the differences between plain parameters (DDP holds the `Parameter`, so `p.data` is assigned: `p.data.set_`
would only change a fresh alias), DTensors (their local part is set in place) and FSDP2's parameters (which also keep a
flat view of the padded shard, that all-gathers read).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from leto_elastic.errors import StateError
from leto_elastic.state.arena import Arena, dense_stride, rebase


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that lies in this process."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def like(template: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """`part` dressed as `template`: a DTensor with its mesh, placements and global shape when that is one."""
    if not isinstance(template, DTensor):
        return part
    return DTensor.from_local(
        part,
        template.device_mesh,
        template.placements,
        run_check=False,
        shape=template.shape,
        stride=template.stride(),
    )


class Site:
    """One parameter and the places that refer to its memory."""

    def __init__(self, name: str, param: torch.Tensor, fsdp: Any) -> None:
        self.name = name
        self.param = param
        self._fsdp = fsdp
        data = local(param)
        if data.device.type != "cpu":
            raise StateError(f"parameter {name} is on {data.device}; only CPU tensors can be retained in this version")
        self.shape = tuple(data.shape)
        self.stride = dense_stride(data)
        self.dtype = data.dtype
        # FSDP2 reads a flat tensor of the padded size, of which the parameter is the first part.
        self.reserve = fsdp._sharded_param_data.numel() if fsdp is not None else 0

    @property
    def data(self) -> torch.Tensor:
        """The local tensor as it is now."""
        return local(self.param).detach()

    def attach(self, arena: Arena, offset: int) -> None:
        """Let the parameter live at `offset` of the arena, where its values already are."""
        with torch.no_grad():
            view = arena.view(offset, self.shape, self.stride, self.dtype)
            if not isinstance(self.param, DTensor):
                self.param.data = view
                return
            rebase(self.param._local_tensor, view)
            if self._fsdp is not None:
                self._fsdp._sharded_param_data = arena.view(offset, (self.reserve,), (1,), self.dtype)


def _fsdp_params(module: nn.Module) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for part in module.modules():
        if isinstance(part, FSDPModule):
            for group in part._get_fsdp_state()._fsdp_param_groups:
                for fsdp_param in group.fsdp_params:
                    found[id(fsdp_param.sharded_param)] = fsdp_param
    return found


def sites(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[Site]:
    """The optimizer's parameters in its order, then the model's that it does not update. Ties appear once."""
    names = {id(p): n for n, p in module.named_parameters()}
    sharded = _fsdp_params(module)
    found: dict[int, Site] = {}
    for g, group in enumerate(optimizer.param_groups):
        for i, param in enumerate(group["params"]):
            name = names.get(id(param), f"optimizer.param_groups[{g}]['params'][{i}]")
            found[id(param)] = Site(name, param, sharded.get(id(param)))
    for name, param in module.named_parameters():
        if id(param) not in found:
            found[id(param)] = Site(name, param, sharded.get(id(param)))
    return list(found.values())


def reset(module: nn.Module) -> None:
    """Forget a step that was given up half-way, so that the next forward starts afresh.

    FSDP2 keeps parameters unsharded between forward and backward, and would go on with those stale ones; and what it
    has accumulated without reduction.
    """
    for part in module.modules():
        if not isinstance(part, FSDPModule):
            continue
        state = part._get_fsdp_state()
        if state._is_root:
            part.reset_iter_state()
        for group in state._fsdp_param_groups:
            for fsdp_param in group.fsdp_params:
                fsdp_param.unsharded_accumulated_grad = None
                unsharded = getattr(fsdp_param, "_unsharded_param", None)
                if unsharded is not None:
                    unsharded.grad = None


def flags(module: nn.Module) -> list[bool]:
    """What DDP remembers of the last forward: whether the next one broadcasts buffers.

    It must be the same in all ranks, or some wait in a broadcast that others never enter.
    """
    return [m.require_forward_param_sync for m in module.modules() if isinstance(m, DistributedDataParallel)]


def set_flags(module: nn.Module, values: list[bool]) -> None:
    """Put `flags` back."""
    parts = [m for m in module.modules() if isinstance(m, DistributedDataParallel)]
    for part, value in zip(parts, values, strict=True):
        part.require_forward_param_sync = value


def bucket_layout(module: nn.Module) -> str:
    """The reducer's buckets of each DDP module inside; they decide the order in which gradients are summed."""
    layouts = []
    for part in module.modules():
        if isinstance(part, DistributedDataParallel):
            data = part._get_ddp_logging_data()  # type: ignore[no-untyped-call]
            layouts.append(
                f"{data.get('has_rebuilt_buckets')} {data.get('rebuilt_bucket_sizes') or data.get('bucket_sizes')} "
                f"{data.get('rebuilt_per_bucket_param_indices')}"
            )
    return "; ".join(layouts)
