"""The life of a shadow: rehearse, attach, park, be promoted.

It has run the user's script up to `leto.steps` on loopback groups. Here it runs the user's own body a few times on the
trainer's first batch, which warms autograd, DDP's buckets (rebuilt before its second forward, with a broadcast: a
shadow warmed for one step would do that after its promotion, alone), compiled code and the optimizer. Then it lets its
model live on the trainer's segments, which frees what the rehearsal made, and waits. It maps that memory but touches
none of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from leto_elastic import wire
from leto_elastic.errors import ShadowUnfit, StateError
from leto_elastic.state import layout, pack
from leto_elastic.state.retained import Retained
from leto_elastic.state.train_state import TrainState
from leto_elastic.state.transaction import raw_step
from leto_elastic.testing import faults as fault_plans
from leto_elastic.worker.link import Delivery, read_blob
from leto_elastic.worker.runner import Runner
from leto_elastic.worker.session import Session, checksum_by
from leto_elastic.worker.step import Step


class Rehearsal:
    """Stands in for the runner while a shadow rehearses."""

    def __init__(self, state: TrainState) -> None:
        self._state = state

    def enter(self, step: Step) -> None:
        """Nothing to prepare."""

    def leave(self, step: Step, _error: BaseException | None) -> bool:
        """Throw away the gradients."""
        step.outcome = "committed"
        self._state.optimizer.zero_grad(set_to_none=True)
        return False


class ShadowLife:
    """A shadow from `leto.steps` to its promotion."""

    def __init__(self, session: Session, state: TrainState, runner: Runner) -> None:
        self._session = session
        self._state = state
        self._runner = runner
        self._manifest: layout.Manifest | None = None
        self._segments: dict[str, tuple[int, int]] = {}

    def live(self) -> Iterator[Step]:
        """Yields the rehearsals; returns when this process has become the slot's trainer and may run steps."""
        self._session.finish_set_up()
        yield from self._rehearse()
        self._session.fabric.prepare(self._session.welcome.store.host, self._session.welcome.store.port)
        self._session.link.send(wire.Rehearsed())
        retained, promotion = self._park()
        self._session.shadow = False
        self._session.mark("attach")
        fault_plans.install(self._session.faults)
        self._runner.resume(retained, promotion)

    def _rehearse(self) -> Iterator[Step]:
        state, optimizer = self._state, self._state.optimizer
        packed: Any = self._session.record["batch"]
        batch = pack.unpack(packed) if packed else state.cursor.next()
        original = optimizer.step

        def step_alone(closure: Any = None) -> Any:
            result = closure() if closure is not None else None
            raw_step(optimizer)
            optimizer._opt_called = True  # type: ignore[attr-defined]
            return result

        optimizer.step = step_alone  # type: ignore[method-assign]
        self._session.fabric.tolerant = True
        rehearsal: Any = Rehearsal(state)
        for _ in range(self._session.policy.shadow.rehearsals):
            step = Step(rehearsal, 0, batch, rehearsal=True)
            yield step
            if step.outcome != "committed":
                raise ShadowUnfit("the body was left without `with step:`")
        self._session.fabric.tolerant = False
        optimizer.step = original  # type: ignore[method-assign]

    def _park(self) -> tuple[Retained, wire.Promote]:
        link = self._session.link
        retained: Retained | None = None
        while True:
            delivery = link.wait((wire.Attach, wire.Prepare, wire.Promote), None, "promotion")
            message = delivery.message
            if isinstance(message, wire.Attach):
                first = retained is None
                retained = self._attach(message, delivery)
                if first:
                    link.send(wire.Ready())
                continue
            assert self._manifest is not None
            assert retained is not None
            step = retained.header.position.step
            if self._manifest.at(step) is not retained.manifest:
                retained = self._build(self._manifest)  # the layout was about to change when the trainer died
            if isinstance(message, wire.Promote):
                self._session.take_stdio(delivery.fds)
                self._session.faults.at("attach", step)
                return retained, message
            self._runner.prepare(retained)

    def _attach(self, message: wire.Attach, delivery: Delivery) -> Retained:
        for fd, _ in self._segments.values():
            os.close(fd)
        manifest_fd, *fds = delivery.fds
        self._manifest = layout.decode(read_blob(manifest_fd, message.manifest_size))
        self._segments = dict(zip(message.names, zip(fds, message.sizes, strict=True), strict=True))
        missing = set(self._manifest.segments) - set(self._segments)
        if missing:
            raise StateError(f"the agent handed over no segment {sorted(missing)}")
        return self._build(self._manifest)

    def _build(self, manifest: layout.Manifest) -> Retained:
        return Retained.attach(
            self._state.model,
            self._state.optimizer,
            manifest,
            self._segments,
            elementwise=self._state.elementwise,
            checksum=checksum_by(self._session.policy),
        )
