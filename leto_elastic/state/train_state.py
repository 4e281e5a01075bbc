"""`TrainState`: all that a step changes, registered once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from leto_elastic.errors import StateError
from leto_elastic.state import pack, rng
from leto_elastic.state.data import DataCursor
from leto_elastic.state.model import flags, local, set_flags


class Section(NamedTuple):
    """Periodic work between two steps."""

    every: int
    run: Callable[[], object]


class TrainState:
    """Everything that a training step reads and changes, so that it can be kept, undone and handed over.

    Args:
        model: the module, as it is trained (wrapped by DDP, sharded by `fully_shard`, or plain).
        optimizer: any torch optimizer over its parameters. One that is not known to be elementwise is updated as a
            whole, with a whole pre-image; see `elementwise`.
        scheduler: a learning-rate scheduler; its `step()` is called once a step, by the commit. Do not call it.
        data: an iterable of batches, iterated again each epoch (`set_epoch` is called where there is one). With
            `state_dict`/`load_state_dict` its position is kept, else a replacement gets there by fast-forward.
        elementwise: whether the optimizer updates each parameter without looking at others; None: as is known of
            torch.optim's own.
        objects: further objects with `state_dict` and `load_state_dict` (an EMA, counters), kept with
            each step.

    Raises:
        StateError: an object that cannot be kept.

    Example:
        >>> state = leto.TrainState(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        data: Iterable[Any] | None = None,
        elementwise: bool | None = None,
        **objects: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise StateError(f"TrainState(model=...) must be a torch.nn.Module, not {type(model).__name__}")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise StateError(
                f"TrainState(optimizer=...) must be one torch.optim.Optimizer, not {type(optimizer).__name__}; "
                "several optimizers are not supported"
            )
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.cursor = DataCursor(data)
        self.elementwise = elementwise
        self.objects: dict[str, Any] = dict(objects)
        self.once: list[Callable[[], object]] = []
        self.sections: list[Section] = []
        kept = {**self.objects, "scheduler": scheduler} if scheduler is not None else self.objects
        for name, value in kept.items():
            if isinstance(value, torch.amp.GradScaler):
                raise StateError(
                    f"TrainState({name}=...): a GradScaler changes after the optimizer's step, outside of the "
                    "transaction, and is not supported; train in bfloat16, which needs none"
                )
            if not (callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))):
                raise StateError(
                    f"TrainState({name}=...): {type(value).__name__} has no state_dict and load_state_dict, "
                    "so it cannot be kept with the step"
                )

    def each_step(self, function: Callable[[], object]) -> None:
        """Run `function` exactly once a committed step, after the update and before the commit.

        For what must change once a step: an EMA, counters, a line in a file. What it changes must be registered (or
        tolerate that a process which is killed within it is replaced, and the function called again from the state
        before). It must not call collectives: ranks may be in it at different times.
        """
        self.once.append(function)

    def every(self, steps: int, function: Callable[[], object]) -> None:
        """Run `function` after each `steps`-th step has been committed, as a section that may use collectives.

        When a failure interrupts it, its next collective raises CommunicatorLost (let it pass), and it is run again
        from its beginning. Random numbers that it draws do not change the training's, modules get their train/eval
        mode back. It must not train: no backward through DDP or FSDP modules.
        """
        if steps < 1:
            raise StateError(f"state.every({steps}, ...): the period must be at least 1 step")
        self.sections.append(Section(steps, function))

    def due(self, step: int) -> list[int]:
        """Indices of the sections that run before `step` (a section every n steps runs after step n-1, 2n-1, ...)."""
        return [i for i, section in enumerate(self.sections) if step and step % section.every == 0]

    def add_objects(self, **objects: Any) -> None:
        """Register further objects, before the first step."""
        self.objects.update(objects)

    # ---- the extras: all of it that is not a parameter or an optimizer tensor

    def capture(self, position: dict[str, Any]) -> bytes:
        """The extras as bytes. Raises StateError for a value that cannot be packed."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        scalars = []
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                state = self.optimizer.state.get(param) or {}
                scalars.append({str(k): v for k, v in state.items() if not isinstance(v, torch.Tensor)})
        return pack.pack(
            {
                "rng": rng.capture(),
                "buffers": {n: local(b) for n, b in self.model.named_buffers() if b.layout is torch.strided},
                "flags": flags(self.model),
                "data": position,
                "groups": groups,
                "scalars": scalars if any(scalars) else [],
                "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
                "objects": {name: value.state_dict() for name, value in self.objects.items()},
            },
            "TrainState",
        )

    def restore(self, data: bytes, *, cursor: bool) -> dict[str, Any]:
        """Put extras back, with `cursor` also the position in the data, which is returned; the random state last."""
        extras = pack.unpack(data)
        if cursor:
            self.cursor.restore(extras["data"])
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if name in extras["buffers"]:
                    local(buffer).copy_(extras["buffers"][name])
        set_flags(self.model, extras["flags"])
        for group, kept in zip(self.optimizer.param_groups, extras["groups"], strict=True):
            for key, value in kept.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value
        if extras["scalars"]:
            params = [param for group in self.optimizer.param_groups for param in group["params"]]
            for param, kept in zip(params, extras["scalars"], strict=True):
                if kept:
                    self.optimizer.state[param].update(kept)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(extras["scheduler"])
        for name, value in self.objects.items():
            value.load_state_dict(extras["objects"][name])
        rng.restore(extras["rng"])
        position: dict[str, Any] = extras["data"]
        return position
