"""The state machine of a job on its node: what an agent does when a process speaks or ends, or a plan arrives.

Pure: a method takes an event and returns actions, in the order in which they must happen. There is no clock, no socket
and no process here, so that every sequence of events can be told as a test.

Guarantees, whatever the order of events:

* A death is followed at once by `Abort` to every other trainer of the epoch, then by its failure record.
* `Plan` and `Promote` of an epoch are sent together, once every replaced rank of the job has a process that is ready.
  Until then survivors wait. A plan that does not cover all dead ranks and lost nodes (one died while it was made) is
  not executed: the remaining deaths are reported again, in its epoch, and the next plan covers them all.
* In a job of several nodes the way into an epoch has stages, at which all nodes meet: *standing* (no trainer moves any
  more, so where each stands is final), then each node brings the state of its slots to the version that follows from
  that, then *ready*. A failure anywhere ends the way; the next plan begins it again, nothing so far is in vain.
* A process that waits to be promoted and dies is a failure of its rank; any other standby is just started again.
* A process that holds an exception is a failure of its rank as if it had died, and stays its trainer until a plan says
  otherwise: to `retry` it gets the plan as a survivor, else it ends by its exception. Before it has ended nobody takes
  its rank and the job does not end, and its exit is not another failure.
* A process that ends by decision of the script (KeyboardInterrupt, SystemExit) ends the job.
* Once a rank has left the loop, all have committed the last step. No epoch is built any more: whoever still waits in
  the loop is released, and a rank that is killed then is replaced once, alone, to do what follows the loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from leto_elastic import wire
from leto_elastic.launch import holders, standbys
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
    Recall,
    Report,
    Restart,
    Say,
    Send,
    Settled,
    Spawn,
    Stand,
    Surrender,
    Warn,
    Welcome,
)
from leto_elastic.launch.slots import Blob, Held, Member, Slot
from leto_elastic.launch.stall import Stall
from leto_elastic.launch.world import PlanView, World
from leto_elastic.recovery.policy import FailureClass

SPARE = -1
"""Rank of the slots of a node that has no place in the job."""


class Job:
    """One start of the group.

    Args:
        held: the segments of each slot.
        shadows: whether slots have shadows.
        restarts_left: whole-group restarts left for a script that never says Hello.
        epoch: at which it starts.
        world: who takes part; None for a job of this node alone.
        staged: memory is protected, so the way into an epoch has its stages also on one node.
    """

    def __init__(
        self,
        held: Sequence[Held],
        *,
        shadows: bool,
        restarts_left: int,
        epoch: int = 0,
        world: World | None = None,
        staged: bool = False,
    ) -> None:
        self.world = world or World.alone(len(held))
        ranks = self.world.own or [SPARE] * len(held)
        self.slots = [
            Slot(index=index, rank=rank, held=segments)
            for index, (rank, segments) in enumerate(zip(ranks, held, strict=True))
        ]
        self.members: dict[int, Member] = {}
        self.leto = False
        self.epoch = epoch
        self.over = False
        self.short: str | None = None  # why memory is too short for shadows
        self.commits: dict[int, wire.Committed] = {}
        self._shadows = shadows
        self._staged = staged or len(self.world.seats) > 1
        self._restarts_left = restarts_left
        self._aborted = False  # this epoch
        self._launched = True  # the plan of this epoch is executed
        self._stood = False  # what this node has said on the way into this epoch
        self._restored = False
        self._readied = False
        self._store, self._skip = wire.StoreAddress("", 0), -1  # of the plan
        self._stall: Stall | None = None
        self._gone: dict[int, str] = {}  # nodes that were lost, by position
        self.ending: str | None = None  # why the job ends as soon as those that hold exceptions have ended by them
        self._left: str | None = None  # who left the training with exit code 0, before its end
        self._skipped: set[int] = set()

    @property
    def spare(self) -> bool:
        """This node has no place in the job (yet)."""
        return self.world.position is None

    @property
    def several(self) -> bool:
        """The job has other nodes."""
        return len(self.world.seats) > 1

    @property
    def protected(self) -> bool:
        return all(slot.protected for slot in self.slots)

    @property
    def finished(self) -> bool:
        return any(slot.finished for slot in self.slots)

    @property
    def steady(self) -> bool:
        """Its ranks train, and may be watched: no recovery is under way here, and the training is not over."""
        trains = self.leto and self._launched and not (self.over or self.finished or self.spare)
        return trains and not self._aborted and self._stall is None

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
            return self._standby_gone(slot, member, code, noticed) if self.ending is None else []
        if slot.trainer is member:
            slot.trainer = None
        if self.ending is not None:
            return self._end(self.ending)
        if member.surrendered:
            return self._launch(noticed)
        if member.quitting is not None:
            return self._quit(slot, member.quitting, code)
        if code == 0 and (slot.finished or not self.leto):
            slot.done = True
            return self._end(None) if all(other.done for other in self.slots) else []
        return self._trainer_gone(slot, slot.mourn(member, code), slot.died(noticed), noticed)

    def raised(self, key: int, message: wire.Raised, now: float) -> list[Action]:
        """A trainer holds an exception of the body of its step; what its rank needs is for a plan to say."""
        member = self.members[key]
        slot = self.slots[member.slot]
        if slot.trainer is not member or slot.lost or slot.verdict is not None or message.epoch < member.planned:
            return []  # it is about to be killed, or was given a plan before this arrived, and goes on by that
        member.failing, member.oom, member.held = message.reason, message.oom, True
        if self.ending is not None:
            return holders.surrender(member)
        if self.finished or not self.protected:
            member.held = False
            return [Surrender(key)]  # its end is the failure
        death = slot.mourn(member, 0, held=True)
        event = Emit("failure", death.fields())
        return [*self._abort(), *self._failed(slot, death, slot.died(now), now), event]

    def quitting(self, key: int, reason: str) -> None:
        """A process is about to end in a way that is not to be repaired."""
        self.members[key].quitting = reason

    def _quit(self, slot: Slot, reason: str, code: int) -> list[Action]:
        """All ranks may leave with exit code 0, which is then the end; one that waits for another then ends the job."""
        if code != 0 or any(trainer.parked for trainer in self._trainers()):
            return self._end(reason)
        slot.done, self._left = True, reason
        return self._end(None) if all(other.done for other in self.slots) else []

    def skipped(self, step: int, reason: str) -> list[Action]:
        """A rank has stepped over a step; of all that tell it, the first one's word counts."""
        if step in self._skipped:
            return []
        self._skipped.add(step)
        return [Emit("skipped", {"step": step, "reason": reason, "total": len(self._skipped)})]

    def _trainer_gone(self, slot: Slot, death: Death, died: float, noticed: float) -> list[Action]:
        event = Emit("failure", death.fields())
        if self._left is not None:
            return [event, *self._end(self._left)]
        if not self.leto:
            if self.several:
                return [event, Report(self.epoch, death)]
            if self._restarts_left > 0:
                self._restarts_left -= 1
                self.over = True
                return [event, Restart(f"{death.told}, {self._restarts_left} restarts left")]
            return [event, *self._end(death.told)]
        if self.finished:
            return [event, *self._replace_alone(slot, death)]
        if not self.protected:
            return [event, *self._end(f"{death.told} before every rank had committed its first step")]
        return [*self._abort(), *self._failed(slot, death, died, noticed), event]

    def _failed(self, slot: Slot, death: Death, died: float, noticed: float) -> list[Action]:
        slot.death = death
        slot.awaiting = False
        self._mourned(death, died, noticed)
        standby = slot.standby
        warning = [Warn(standby.key)] if standby is not None and standby.ready and not death.held else []
        return [Report(self.epoch, death), *warning]

    def _mourned(self, death: Death, died: float, noticed: float) -> None:
        if self._stall is None:
            self._stall = Stall(died=died, noticed=noticed, newest=max(self.newest(), death.step))
        self._stall.add(death)

    def newest(self) -> int:
        """The newest step that a slot of this node stands at."""
        positions = [position for position in (slot.position() for slot in self.slots) if position is not None]
        return max((position.step for position in positions), default=0)

    # ---- other nodes

    def failed_elsewhere(self, epoch: int, death: Death, now: float) -> list[Action]:
        """A rank failed in `epoch`; of no effect for one of this node, or when that epoch is over."""
        if self.over or self.finished or self.spare or not self.leto:
            return []
        if epoch != self.epoch or death.rank in self.world.own:
            return []
        self._mourned(death, now, now)
        return self._abort()

    def node_gone(self, position: int, now: float) -> list[Action]:
        """The node at a position is lost, with all its ranks and its memory; may be told again."""
        if self.over or self.finished or self.spare:
            return []
        node = self.world.seats[position].node
        news = self._gone.get(position) != node
        self._gone[position] = node
        reports = self._lost_nodes(now)
        ranks = self.world.ranks(position)
        deaths = [report.death for report in reports if isinstance(report, Report) and report.death.rank in ranks]
        events = [Emit("failure", death.fields()) for death in deaths if news]
        return [*self._abort(), *reports, *events]

    def _lost_nodes(self, now: float) -> list[Action]:
        """Report the nodes that are gone and still have their places."""
        reports: list[Action] = []
        for position, node in self._gone.items():
            if self.world.seats[position].node == node:
                for rank in self.world.ranks(position):
                    death = Death(rank, rank, 0, 0, FailureClass.NODE, self.newest(), "", 0)
                    self._mourned(death, now, now)
                    reports.append(Report(self.epoch, death))
        return reports

    def _abort(self) -> list[Action]:
        first, self._aborted = not self._aborted, True
        if not first or not self._launched:
            return []
        return [Send(m.key, wire.Abort(self.epoch)) for m in self._trainers() if m.greeted]

    def _replace_alone(self, slot: Slot, death: Death) -> list[Action]:
        if death.cause is not FailureClass.SIGNAL or slot.alone:
            return self._end(f"{death.told} after the training was over")
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
            return [Publish(slot.index), *self._trainer_gone(slot, slot.mourn(member, code), noticed, noticed)]
        return [Publish(slot.index), *standbys.died(slot, member, code), *self.shadows_wanted()]

    def shadows_wanted(self) -> list[Action]:
        """Start the shadows that are missing and may run."""
        if not self._shadows or self.over or self.finished or self.short is not None:
            return []
        if self.spare:
            return standbys.for_spare(self.slots)
        if not self.protected or self._stall is not None:
            return []
        return standbys.for_trainers(self.slots)

    def memory(self, short: str | None) -> list[Action]:
        """Memory is too short for shadows, and why; or it is not."""
        before, self.short = self.short, short
        return self.shadows_wanted() if short is None else standbys.give_up(self.slots, short, first=before is None)

    def resume(self, store: wire.StoreAddress, now: float) -> list[Action]:
        """Begin with the state that another agent left: the slots have everything but a process, which they get now."""
        self.leto, self._store, self._launched = True, store, False
        self._stall = Stall(died=now, noticed=now, newest=self.newest())
        actions: list[Action] = []
        for slot in self.slots:
            slot.awaiting = True
            self._stall.add(Death(slot.rank, slot.index, 0, 0, FailureClass.SIGNAL, self.newest(), "", 0))
            self._stall.actions[slot.rank] = "adopt"
            actions += [Publish(slot.index), *self._stand_in(slot)]
        return actions

    # ---- plans

    def plan(self, plan: PlanView, now: float) -> list[Action]:
        """A plan arrived; one that is not newer than the epoch is ignored."""
        if self.over or self.ending is not None or plan.epoch <= self.epoch:
            return []
        if plan.action == "fail":
            return self._end(plan.reason)
        if plan.action == "finish":
            self.epoch = plan.epoch
            return self._training_over()
        if self.finished:
            return self._object(plan.epoch) if self.several else []
        if plan.action == "restart":
            self.over = True
            return [Restart(plan.reason)]
        if self.spare:
            return self._take_place(plan, now) if plan.world.position is not None else []
        actions = self._abort()
        self._enter(plan)
        for slot in self.slots:
            if slot.death is not None and slot.rank in plan.repairs:
                actions += self._repair(slot, plan.repairs[slot.rank])
        uncovered: list[Action] = [Report(self.epoch, slot.death) for slot in self.slots if slot.death is not None]
        uncovered += self._lost_nodes(now)
        for death in plan.deaths:
            self._mourned(death, now, now)
        if self._stall is not None:
            for rank in set(plan.repairs) - set(self.world.own):
                self._stall.actions[rank] = plan.repairs[rank]
        if uncovered:
            self._aborted = True
            return [*actions, *uncovered]
        return [*actions, *self._launch(now)]

    def _enter(self, plan: PlanView) -> None:
        self.epoch = plan.epoch
        self.world = plan.world if plan.world.seats and plan.world.size else self.world
        self.commits.clear()
        self._store, self._skip = plan.store, plan.skip
        self._launched = self._aborted = False
        self._stood = self._restored = self._readied = False

    def _take_place(self, plan: PlanView, now: float) -> list[Action]:
        """This node was a spare, and gets the place of a lost one: its ranks, whose memory the others restore."""
        self._enter(plan)
        self.leto = True
        actions: list[Action] = []
        for slot, rank in zip(self.slots, plan.world.own, strict=True):
            slot.rank, slot.awaiting, slot.lost = rank, True, True
            actions.append(Recall(slot.index))
        for death in plan.deaths:
            self._mourned(death, now, now)
        assert self._stall is not None
        self._stall.actions.update(dict.fromkeys(plan.world.own, "replace"))
        return [*actions, *self._launch(now)]

    def recalled(self, slot_index: int, record: Blob) -> list[Action]:
        """The set-up record of a slot that this node has taken over was fetched from its keepers."""
        slot = self.slots[slot_index]
        slot.record = record
        if slot.standby is not None:
            slot.standby.kind = "respawn"
            welcome = [Welcome(slot.standby.key)] if slot.standby.greeted else []
            return [Hurry(slot.standby.key), *welcome]
        return self._stand_in(slot)

    def _object(self, epoch: int) -> list[Action]:
        """They would build an epoch without this node, which has finished the training: so have they."""
        self.epoch = epoch
        done = [slot for slot in self.slots if slot.finished]
        reports = [
            Report(epoch, Death(slot.rank, slot.index, 0, 0, FailureClass.EXIT, self.newest(), "done", 0))
            for slot in done[:1]
        ]
        return [*(Publish(slot.index) for slot in self.slots), *reports]

    def _repair(self, slot: Slot, action: str) -> list[Action]:
        assert self._stall is not None
        holder, standby = slot.trainer, slot.standby
        if action == "retry":
            if holder is not None and not holder.surrendered:  # else its end is reported again
                slot.death = None
                self._stall.actions[slot.rank] = action
            return []
        slot.death = None
        slot.awaiting = True
        surrender = [] if holder is None else holders.surrender(holder)
        if standby is not None and standby.ready:
            self._stall.actions[slot.rank] = action
            return surrender
        self._stall.actions[slot.rank] = "respawn"
        return [*surrender, *self._stand_in(slot)]

    def _stand_in(self, slot: Slot) -> list[Action]:
        """Have a process made ready as soon as possible; nothing to do when one is."""
        standby = slot.standby
        if standby is not None:
            if standby.ready:
                return []
            standby.kind = "respawn"
            return [Hurry(standby.key)]
        if slot.record is None and slot.lost:
            return [Recall(slot.index)]
        if slot.spawning:
            return []
        slot.spawning = True
        return [Spawn(slot.index, "respawn")]

    def _launch(self, now: float) -> list[Action]:
        """Execute the plan of this epoch, if everything is there."""
        if self._launched or self._aborted or self._stall is None:
            return []
        if self._staged and not self._restored:
            return self._stand()
        if any(member.surrendered for member in self._trainers()):
            return []
        if any(slot.awaiting and (slot.standby is None or not slot.standby.ready) for slot in self.slots):
            return []
        if self._staged:
            first, self._readied = not self._readied, True
            return [Say(self.epoch, "ready")] if first else []
        return self._go(now)

    def _stand(self) -> list[Action]:
        if self._stood or not all(slot.trainer is None or slot.trainer.parked for slot in self.slots):
            return []
        self._stood = True
        return [Stand(self.epoch)]

    def parked(self, key: int, now: float) -> list[Action]:
        """A trainer waits for a plan, and its header does not move any more."""
        self.members[key].parked = True
        return self._launch(now) if self._left is None else self._end(self._left)

    def restored(self, epoch: int, version: int | None, manifests: Mapping[int, Blob], now: float) -> list[Action]:
        """The state of this node's slots is at `version` (None: nothing had to be moved).

        `manifests`: of slots whose memory was lost and is there again, by index.
        """
        if epoch != self.epoch or self._stall is None:
            return []
        actions: list[Action] = []
        for index, manifest in manifests.items():
            slot = self.slots[index]
            slot.manifest, slot.lost = manifest, False
            if slot.standby is not None and slot.standby.rehearsed:
                actions.append(self._attach(slot, slot.standby))
        self._restored = True
        self._stall.version = version
        return [*actions, *self._launch(now)]

    def damaged(self, ranks: Sequence[int]) -> list[Action]:
        """The memory of these ranks of this node is not what it should be: their processes must not go on with it."""
        actions: list[Action] = []
        for slot in self.slots:
            if slot.rank not in ranks:
                continue
            slot.lost = True
            if slot.trainer is not None and not slot.trainer.surrendered:  # its end is the failure
                actions.append(Kill(slot.trainer.key))
            else:
                slot.death = Death(slot.rank, slot.index, 0, 0, FailureClass.STATE, self.newest(), "", 0)
                slot.awaiting, self._aborted = False, True
                actions.append(Report(self.epoch, slot.death))
        return actions

    def all_ready(self, epoch: int, now: float) -> list[Action]:
        """Every node has all it needs for `epoch`."""
        if epoch != self.epoch or self._launched or self._aborted or self._stall is None:
            return []
        return self._go(now)

    def _go(self, now: float) -> list[Action]:
        assert self._stall is not None
        self._launched = True
        self._stall.launched = now
        promotions: list[Action] = []
        plans: list[Action] = []
        for slot in self.slots:
            if slot.awaiting:
                promotions += self._promote(slot, self._store)
            elif slot.trainer is not None:
                holders.goes_on(slot.trainer, self.epoch)
                plan = wire.Plan(self.epoch, self._store, self.world.generation, self._skip)
                plans.append(Send(slot.trainer.key, plan))
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
        promote = wire.Promote(self.epoch, slot.manifest.version, store, self.world.generation, self._skip)
        return [*actions, HandOver(member.key, promote)]

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

    def failing(self, key: int, reason: str, *, oom: bool = False) -> None:
        """A process is about to end by an exception; `oom`: one that tells of want of memory."""
        self.members[key].failing, self.members[key].oom = reason, oom

    def finish(self, key: int) -> list[Action]:
        """A trainer has left the loop, so the training is over on all ranks, also on those that died in its barrier."""
        slot = self.slots[self.members[key].slot]
        slot.finished = True
        return [Publish(slot.index), *(self._training_over() if self._stall is not None else [])]

    def _training_over(self) -> list[Action]:
        """Nobody builds an epoch any more: release who waits for one, replace alone who died."""
        self._stall = None
        actions = self._release()
        for slot in self.slots:
            if slot.lost:  # what it had still to do after the loop is lost with its node
                slot.done = True
            elif slot.death is not None or slot.awaiting:
                slot.death, slot.alone, slot.awaiting = None, True, True
                actions += self._stand_in(slot)
        if all(slot.done for slot in self.slots):
            return self._end(None)
        return [*actions, *self._launch_alone()]

    def _end(self, reason: str | None) -> list[Action]:
        holding = [member for member in self._trainers() if member.held] if reason is not None else []
        if holding:  # their tracebacks are the last that is seen of the job
            self.ending = self.ending or reason
            return [action for member in holding for action in holders.surrender(member)]
        self.over = True
        return [End(reason)]
