"""The state machine of a job on one node: what an agent does when a process speaks or ends, or a plan arrives.

Pure: a method takes an event and returns actions, in the order in which they must happen. There is no clock, no socket
and no process here, so that every sequence of events can be told as a test.

Guarantees, whatever the order of events:

* A death is followed at once by `Abort` to every other trainer of the epoch, then by its failure record.
* `Plan` and `Promote` of an epoch are sent together, once every replaced rank has a process that is ready. Until then
  survivors wait. A plan that does not cover all dead ranks (one died while it was made) is not executed: the remaining
  deaths are reported again, in its epoch, and the next plan covers them all.
* A process that waits to be promoted and dies is a failure of its rank; any other standby is just started again.
* Once a rank has left the loop, all have committed the last step. No epoch is built any more: whoever still waits in
  the loop is released, and a rank that is killed then is replaced once, alone, to do what follows the loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from leto_elastic import wire
from leto_elastic.launch.actions import (
    Action,
    Death,
    Emit,
    End,
    HandOver,
    Hurry,
    Kill,
    Kind,
    Publish,
    Report,
    Restart,
    Send,
    Settled,
    Spawn,
    Warn,
)
from leto_elastic.launch.slots import Blob, Held, Member, Slot
from leto_elastic.launch.stall import Stall
from leto_elastic.recovery.policy import FailureClass

QUICK_DEATHS = 3
"""So many shadows of a slot in a row that die before they are ready, and no further one is started."""


@dataclass(frozen=True, slots=True)
class PlanView:
    """Of a plan, what an agent needs. `repairs`: action by slot."""

    epoch: int
    action: Literal["repair", "restart", "fail"]
    repairs: Mapping[int, str]
    store: wire.StoreAddress
    reason: str


class Job:
    """One start of the group.

    Args:
        held: the segments of each slot; slot and rank are the same on a single node.
        shadows: whether slots have shadows.
        restarts_left: whole-group restarts left for a script that never says Hello.
    """

    def __init__(self, held: Sequence[Held], *, shadows: bool, restarts_left: int, epoch: int = 0) -> None:
        self.slots = [Slot(index=index, rank=index, held=segments) for index, segments in enumerate(held)]
        self.members: dict[int, Member] = {}
        self.leto = False
        self.epoch = epoch
        self.over = False
        self.short: str | None = None  # why memory is too short for shadows
        self.commits: dict[int, wire.Committed] = {}
        self._shadows = shadows
        self._restarts_left = restarts_left
        self._aborted = False  # this epoch
        self._launched = True  # the plan of this epoch is executed
        self._store = wire.StoreAddress("", 0)
        self._stall: Stall | None = None

    @property
    def protected(self) -> bool:
        return all(slot.protected for slot in self.slots)

    @property
    def finished(self) -> bool:
        return any(slot.finished for slot in self.slots)

    # ---- processes

    def started(self, key: int, slot_index: int, kind: Kind, pid: int) -> list[Action]:
        """A process that `Spawn` asked for runs."""
        slot = self.slots[slot_index]
        member = self.members[key] = Member(key, slot_index, kind, pid)
        role = "trainer" if kind == "trainer" else "shadow"
        fields: dict[str, object] = {"role": role, "rank": slot.rank, "slot": slot_index, "pid": pid}
        actions: list[Action] = [Emit("worker_started", fields)]
        if kind == "trainer":
            slot.trainer = member
            return actions
        slot.standby = member
        slot.spawning = False
        if slot.awaiting and kind == "shadow":
            member.kind = "respawn"
            actions.append(Hurry(key))
        return [*actions, Publish(slot_index)]

    def exited(self, key: int, code: int, noticed: float) -> list[Action]:
        """A process ended, with exit code or minus the signal's number."""
        member = self.members.pop(key)
        slot = self.slots[member.slot]
        if self.over:
            return []
        if slot.standby is member:
            slot.standby = None
            return self._standby_gone(slot, member, code, noticed)
        slot.trainer = None
        if code == 0 and (slot.finished or not self.leto):
            slot.done = True
            return self._end(None) if all(other.done for other in self.slots) else []
        return self._trainer_gone(slot, slot.mourn(member, code), slot.died(noticed), noticed)

    def _trainer_gone(self, slot: Slot, death: Death, died: float, noticed: float) -> list[Action]:
        event = Emit("failure", _fields(death))
        if not self.leto:
            if self._restarts_left > 0:
                self._restarts_left -= 1
                self.over = True
                return [event, Restart(f"{_told(death)}, {self._restarts_left} restarts left")]
            return [event, *self._end(_told(death))]
        if self.finished:
            return [event, *self._replace_alone(slot, death)]
        if not self.protected:
            return [event, *self._end(f"{_told(death)} before every rank had committed its first step")]
        return [*self._abort(), *self._failed(slot, death, died, noticed), event]

    def _failed(self, slot: Slot, death: Death, died: float, noticed: float) -> list[Action]:
        slot.death = death
        slot.awaiting = False
        if self._stall is None:
            positions = [position for position in (other.position() for other in self.slots) if position is not None]
            newest = max((position.step for position in positions), default=death.step)
            self._stall = Stall(died=died, noticed=noticed, newest=newest)
        self._stall.deaths.append(death)
        standby = slot.standby
        warning = [Warn(standby.key)] if standby is not None and standby.ready else []
        return [Report(self.epoch, death), *warning]

    def _abort(self) -> list[Action]:
        first, self._aborted = not self._aborted, True
        if not first or not self._launched:
            return []
        return [Send(m.key, wire.Abort(self.epoch)) for m in self._trainers() if m.greeted]

    def _replace_alone(self, slot: Slot, death: Death) -> list[Action]:
        if death.cause is not FailureClass.SIGNAL or slot.alone:
            return self._end(f"{_told(death)} after the training was over")
        slot.death, slot.alone, slot.awaiting = None, True, True
        return [*self._release(), *self._stand_in(slot), *self._launch_alone()]

    def _release(self) -> list[Action]:
        """Wake whoever is blocked in a communicator, and let those that wait for an epoch leave the loop."""
        trainers = [slot.trainer for slot in self.slots if slot.trainer is not None]
        waiting = [slot.trainer for slot in self.slots if slot.trainer is not None and not slot.finished]
        return [
            *(Send(member.key, wire.Abort(self.epoch)) for member in trainers),
            *(Send(member.key, wire.Release()) for member in waiting),
        ]

    def _launch_alone(self) -> list[Action]:
        actions: list[Action] = []
        for slot in self.slots:
            if slot.alone and slot.awaiting and slot.standby is not None and slot.standby.ready:
                fields: dict[str, object] = {"rank": slot.rank, "slot": slot.index, "pid": slot.standby.pid}
                actions += [*self._promote(slot, wire.StoreAddress("", 0)), Emit("replaced", fields)]
        return actions

    def _trainers(self) -> list[Member]:
        return [slot.trainer for slot in self.slots if slot.trainer is not None]

    def _standby_gone(self, slot: Slot, member: Member, code: int, noticed: float) -> list[Action]:
        if slot.awaiting:
            return self._trainer_gone(slot, slot.mourn(member, code), noticed, noticed)
        actions: list[Action] = [Publish(slot.index)]
        if not (member.ready or member.dismissed or slot.unfit):
            slot.quick_deaths += 1
            if slot.quick_deaths == QUICK_DEATHS:
                reason = f"it died {QUICK_DEATHS} times in a row before it was ready, see its log; last: {_how(code)}"
                actions.append(Emit("shadow_given_up", {"slot": slot.index, "reason": reason}))
        return [*actions, *self.shadows_wanted()]

    def shadows_wanted(self) -> list[Action]:
        """Start the shadows that are missing and may run."""
        if not self._shadows or self.over or self.finished or self.short is not None:
            return []
        if not self.protected or self._stall is not None:
            return []
        actions: list[Action] = []
        for slot in self.slots:
            missing = slot.standby is None and not slot.spawning and slot.trainer is not None
            if missing and slot.record is not None and not slot.unfit and slot.quick_deaths < QUICK_DEATHS:
                slot.spawning = True
                actions.append(Spawn(slot.index, "shadow"))
        return actions

    def memory(self, short: str | None) -> list[Action]:
        """Memory is too short for shadows, and why; or it is not."""
        before, self.short = self.short, short
        if short is None:
            return self.shadows_wanted()
        actions: list[Action] = []
        for slot in self.slots:
            if slot.standby is not None and not slot.awaiting:
                if before is None:
                    actions.append(Emit("shadow_given_up", {"slot": slot.index, "reason": short}))
                slot.standby.dismissed = True
                actions.append(Kill(slot.standby.key))
        return actions

    # ---- plans

    def plan(self, plan: PlanView, now: float) -> list[Action]:
        """A plan arrived; one that is not newer than the epoch is ignored."""
        if self.over or self.finished or plan.epoch <= self.epoch:
            return []
        if plan.action == "fail":
            return self._end(plan.reason)
        if plan.action == "restart":
            self.over = True
            return [Restart(plan.reason)]
        self.epoch = plan.epoch
        self.commits.clear()
        self._store = plan.store
        self._launched = False
        self._aborted = False
        actions: list[Action] = []
        for slot in self.slots:
            if slot.death is not None and slot.index in plan.repairs:
                actions += self._repair(slot, plan.repairs[slot.index])
        uncovered = [slot.death for slot in self.slots if slot.death is not None]
        if uncovered:
            self._aborted = True
            return [*actions, *(Report(self.epoch, death) for death in uncovered)]
        return [*actions, *self._launch(now)]

    def _repair(self, slot: Slot, action: str) -> list[Action]:
        slot.death = None
        slot.awaiting = True
        assert self._stall is not None
        standby = slot.standby
        if standby is not None and standby.ready:
            self._stall.actions[slot.rank] = action
            return []
        self._stall.actions[slot.rank] = "respawn"
        return self._stand_in(slot)

    def _stand_in(self, slot: Slot) -> list[Action]:
        """Have a process made ready as soon as possible; nothing to do when one is."""
        standby = slot.standby
        if standby is not None:
            if standby.ready:
                return []
            standby.kind = "respawn"
            return [Hurry(standby.key)]
        if slot.spawning:
            return []
        slot.spawning = True
        return [Spawn(slot.index, "respawn")]

    def _launch(self, now: float) -> list[Action]:
        """Execute the plan of this epoch, if everything is there."""
        if self._launched or self._aborted or self._stall is None:
            return []
        if any(slot.awaiting and (slot.standby is None or not slot.standby.ready) for slot in self.slots):
            return []
        self._launched = True
        self._stall.launched = now
        promotions: list[Action] = []
        plans: list[Action] = []
        for slot in self.slots:
            if slot.awaiting:
                promotions += self._promote(slot, self._store)
            elif slot.trainer is not None:
                plans.append(Send(slot.trainer.key, wire.Plan(self.epoch, self._store)))
        return [*promotions, *plans, *(Publish(slot.index) for slot in self.slots)]

    def _promote(self, slot: Slot, store: wire.StoreAddress) -> list[Action]:
        member = slot.standby
        assert member is not None
        assert slot.manifest is not None
        actions: list[Action] = []
        if member.attached < slot.manifest.version:
            actions.append(self._attach(slot, member))
        slot.trainer, slot.standby = member, None
        slot.awaiting = False
        slot.unfit = False
        slot.quick_deaths = 0
        member.kind = "trainer"
        return [*actions, HandOver(member.key, wire.Promote(self.epoch, slot.manifest.version, store))]

    def _attach(self, slot: Slot, member: Member) -> Send:
        assert slot.manifest is not None
        member.attached = slot.manifest.version
        names = list(slot.held.fds)
        sizes = [slot.held.sizes[name] for name in names]
        message = wire.Attach(slot.manifest.version, slot.manifest.size, names, sizes)
        return Send(member.key, message, (slot.manifest.fd, *slot.held.fds.values()))

    # ---- messages

    def greeted(self, key: int) -> None:
        """Its Hello was answered."""
        self.leto = True
        self.members[key].greeted = True

    def recorded(self, key: int, blob: Blob) -> list[Action]:
        """The trainer's set-up record arrived."""
        self.slots[self.members[key].slot].record = blob
        return self.shadows_wanted()

    def laid_out(self, key: int, blob: Blob) -> list[Action]:
        """A manifest arrived."""
        slot = self.slots[self.members[key].slot]
        first = slot.manifest is None
        slot.manifest = blob
        actions: list[Action] = [Publish(slot.index)] if first else []
        if slot.standby is not None and slot.standby.rehearsed:  # now, and not at its promotion
            actions.append(self._attach(slot, slot.standby))
        return [*actions, *self.shadows_wanted()]

    def committed(self, key: int, commit: wire.Committed, now: float) -> list[Action]:
        """A rank's first commit in an epoch."""
        slot = self.slots[self.members[key].slot]
        if commit.epoch != self.epoch or slot.trainer is not self.members[key]:
            return []
        self.commits[slot.rank] = commit
        if len(self.commits) < len(self.slots) or self._aborted:
            return []
        actions: list[Action] = [Settled(self.epoch)]
        if self._stall is not None:
            stall, self._stall = self._stall, None
            pids = {s.rank: s.trainer.pid for s in self.slots if s.trainer is not None and s.rank in stall.actions}
            actions.append(Emit("recovery", stall.fields(self.epoch, self.commits, now, pids)))
        return [*actions, *self.shadows_wanted()]

    def rehearsed(self, key: int) -> list[Action]:
        """A standby wants its segments; it was started because the slot is protected, so they are there."""
        member = self.members[key]
        slot = self.slots[member.slot]
        member.rehearsed = True
        return [self._attach(slot, member)] if slot.manifest is not None else []

    def ready(self, key: int, now: float) -> list[Action]:
        """A standby is parked."""
        member = self.members[key]
        slot = self.slots[member.slot]
        member.ready = True
        slot.quick_deaths = 0
        event = Emit("shadow_ready", {"rank": slot.rank, "slot": slot.index, "pid": member.pid})
        return [Publish(slot.index), event, *self._launch(now), *self._launch_alone()]

    def unfit(self, key: int, reason: str) -> list[Action]:
        """A standby cannot stand in. Not tried again until the slot has another trainer."""
        member = self.members[key]
        slot = self.slots[member.slot]
        slot.unfit = True
        event = Emit("shadow_unfit", {"rank": slot.rank, "slot": slot.index, "pid": member.pid, "reason": reason})
        if slot.awaiting:
            return [event, *self._end(f"rank {slot.rank} cannot be replaced: {reason}")]
        return [event, Publish(slot.index)]

    def failing(self, key: int, reason: str) -> None:
        """A process is about to end by an exception."""
        self.members[key].failing = reason

    def finish(self, key: int) -> list[Action]:
        """A trainer has left the loop, so the training is over on all ranks, also on those that died in its barrier."""
        slot = self.slots[self.members[key].slot]
        slot.finished = True
        actions: list[Action] = [Publish(slot.index)]
        if self._stall is None:
            return actions
        self._stall = None
        actions += self._release()
        for other in self.slots:
            if other.death is not None or other.awaiting:
                other.death, other.alone, other.awaiting = None, True, True
                actions += self._stand_in(other)
        return [*actions, *self._launch_alone()]

    def _end(self, reason: str | None) -> list[Action]:
        self.over = True
        return [End(reason)]


def _fields(death: Death) -> dict[str, object]:
    return {
        "rank": death.rank,
        "slot": death.slot,
        "pid": death.pid,
        "cause": str(death.cause),
        "code": death.code,
        "step": death.step,
        "phase": death.phase,
        "chunk": death.chunk,
    }


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _told(death: Death) -> str:
    return f"rank {death.rank} ended ({_how(death.code)})"
