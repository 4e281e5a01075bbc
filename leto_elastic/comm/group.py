"""The process group that the user's program holds for ever.

DDP, FSDP2, DeviceMesh and user code keep the outer object; the inner group, which is torch's own `ProcessGroup` over
gloo (or gloo and NCCL), is replaced at every epoch. All calls are forwarded, so overloads, checks and results are
torch's. In a shadow there is no inner group and every collective is a loopback.

torch's trampoline for Python groups asks for a group's name through Python and knows both the older and the newer names
of several collectives (`_allgather_base` and `all_gather_single`, ...): all of them are here, or DeviceMesh and FSDP2
fail with "No backend type associated with device type".

`torch.distributed.split_group` needs a bound accelerator device and a backend that can split, as for plain gloo; the
method is here for direct callers and makes a group the way `new_group` does.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, HashStore, Store, Work

from leto_elastic.comm import loopback, reduced
from leto_elastic.comm.work import LetoWork, PointToPointWork

if TYPE_CHECKING:
    from leto_elastic.comm.fabric import Fabric

# Operations that talk to a peer when they are called; the others are only queued, and an error is the caller's mistake.
_POINT_TO_POINT = frozenset({"send", "recv", "recv_anysource"})
_IMMEDIATE = _POINT_TO_POINT | {"monitored_barrier"}


def _forward(op: str) -> Any:
    def method(self: LetoGroup, *args: Any, **kwargs: Any) -> Work:
        return self._run(op, args, kwargs)

    method.__name__ = op
    method.__doc__ = f"`ProcessGroup.{op}` of the current epoch's inner group."
    return method


class LetoGroup(dist.ProcessGroup):
    """One group of the job; made by `torch.distributed`, not by users."""

    def __init__(self, fabric: Fabric, name: str, rank: int, size: int, timeout: timedelta, ranks: list[int]) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.inner: dist.ProcessGroup | None = None
        self.timeout = timeout
        self.ranks = ranks
        self._fabric = fabric
        self._name = name
        self._desc = "undefined"
        self._place = loopback.Place(rank, size)
        self._store = HashStore()
        self.calls = 0  # collectives so far

    # ---- identity

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The backend's name."""
        return "leto"

    def _get_backend_name(self) -> str:
        return "leto"

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """The name that torch gave to the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        """Called by torch."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        """The description that the user gave to the group."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802 - torch's name
        """Called by torch."""
        self._desc = desc

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    @property
    def group_name(self) -> Any:
        """The name that torch gave to the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The description that the user gave to the group."""
        return self._desc

    def get_group_store(self) -> Store:
        """The inner group's store; of one epoch only."""
        return self._store if self.inner is None else self.inner.get_group_store()

    @property
    def _device_types(self) -> list[torch.device]:
        devices = [torch.device("cpu")]
        if torch.cuda.is_available():
            devices.append(torch.device("cuda"))
        return devices

    def _get_backend(self, device: torch.device) -> Any:
        if self.inner is None:
            return FakeProcessGroup._create_internal(self._place.rank, self._place.size)
        return self.inner._get_backend(device)

    def _has_hooks(self) -> bool:
        return False

    def _get_sequence_number_for_group(self) -> int:
        return self.calls

    def _set_sequence_number_for_group(self) -> None:
        pass

    def set_timeout(self, timeout: timedelta) -> None:
        """Time limit of one collective, from now on."""
        self.timeout = timeout
        if self.inner is not None:
            self.inner.set_timeout(timeout)

    # ---- end

    def abort(self) -> None:
        """Give the group up, as `shutdown`."""
        self.shutdown()

    def shutdown(self) -> None:
        """Called by `destroy_process_group`: the group takes part in no later epoch."""
        self._fabric.forget(self)

    def split_group(self, new_ranks: list[int], *args: Any, **kwargs: Any) -> dist.ProcessGroup | None:
        """A group of some ranks of this one; see `torch.distributed.split_group`. None for ranks that are not in it."""
        timeout = args[0] if args else kwargs.get("timeout")
        name = kwargs.get("group_name") or f"{self._name}:{'-'.join(map(str, new_ranks))}"
        if self._place.rank not in new_ranks:
            return None
        part = self._fabric.create(
            name,
            new_ranks.index(self._place.rank),
            len(new_ranks),
            timeout or self.timeout,
            [self.ranks[rank] for rank in new_ranks],
        )
        part.setGroupDesc(kwargs.get("group_desc") or "undefined")
        return part

    # ---- collectives

    def _run(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work:
        fabric, spec = self._fabric, loopback.OPS[op]
        tensors = loopback.leading(spec, args, kwargs)
        outputs = loopback.outputs_of(spec, tensors)
        number, self.calls = self.calls, self.calls + 1
        if fabric.loopback:
            with torch.no_grad():
                spec.fill(self._place, tensors)
            source = fabric.replayed(self._name, number, op, outputs)
            return LetoWork(fabric, fabric.epoch, None, outputs, source=source)
        epoch, inner = fabric.epoch, self.inner
        if fabric.poisoned or inner is None:
            return self._lost(epoch, outputs)
        on_done = fabric.recorded(self._name, op, outputs)
        started: reduced.Reduced | None = None
        try:
            if op in reduced.OPS and not fabric.nccl:
                started = reduced.start(inner, op, args, kwargs, self._place.rank, self._place.size)
            work = started.work if started is not None else getattr(inner, op)(*args, **kwargs)
        except RuntimeError as error:
            if not (op in _IMMEDIATE or fabric.poisoned):
                raise
            fabric.failed(epoch, str(error).partition("\n")[0])
            return self._lost(epoch, outputs)
        if op in _POINT_TO_POINT:
            return fabric.track(PointToPointWork(fabric, epoch, work, outputs, on_done=on_done))
        slices = not fabric.nccl or bool(outputs and outputs[0].is_cpu)
        take = started.take if started is not None else None
        made = LetoWork(fabric, epoch, work, outputs, on_done=on_done, owner=id(inner), slices=slices, take=take)
        return fabric.track(made)

    def _lost(self, epoch: int, outputs: list[torch.Tensor]) -> Work:
        if not self._fabric.forgives(epoch):
            raise self._fabric.error(epoch)
        return LetoWork(self._fabric, epoch, None, outputs, lost=True)

    allreduce = _forward("allreduce")
    allreduce_coalesced = _forward("allreduce_coalesced")
    broadcast = _forward("broadcast")
    reduce = _forward("reduce")
    allgather = _forward("allgather")
    allgather_coalesced = _forward("allgather_coalesced")
    _allgather_base = _forward("_allgather_base")
    all_gather_single = _forward("all_gather_single")
    allgather_into_tensor_coalesced = _forward("allgather_into_tensor_coalesced")
    all_gather_single_coalesced = _forward("all_gather_single_coalesced")
    gather = _forward("gather")
    scatter = _forward("scatter")
    reduce_scatter = _forward("reduce_scatter")
    _reduce_scatter_base = _forward("_reduce_scatter_base")
    reduce_scatter_single = _forward("reduce_scatter_single")
    reduce_scatter_tensor_coalesced = _forward("reduce_scatter_tensor_coalesced")
    reduce_scatter_single_coalesced = _forward("reduce_scatter_single_coalesced")
    alltoall = _forward("alltoall")
    alltoall_base = _forward("alltoall_base")
    all_to_all_single = _forward("all_to_all_single")
    send = _forward("send")
    recv = _forward("recv")
    recv_anysource = _forward("recv_anysource")
    barrier = _forward("barrier")

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        """`ProcessGroup.monitored_barrier`; `torch.distributed.monitored_barrier` itself insists on the name gloo."""
        self._run("monitored_barrier", args, kwargs)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesce("_start_coalescing", device)

    def _end_coalescing(self, device: torch.device) -> Work:
        work: Work | None = self._coalesce("_end_coalescing", device)
        return work if work is not None else LetoWork(self._fabric, self._fabric.epoch, None, [])

    def _coalesce(self, method: str, device: torch.device) -> Any:
        inner: dist.ProcessGroup | None = self.inner
        if inner is None or self._fabric.poisoned:
            return None
        call: Callable[[torch.device], Any] = getattr(inner, method)
        return call(device)
