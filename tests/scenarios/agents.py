"""A job of several nodes without a process: its agents' state machines, its records, and the decisions about it.

All of that is real (`launch.job`, `coordinator.leader.Mirror`, `recovery.ladder`). Around it is as little as possible:
records that are written are seen by everyone at once, and a process does what it is asked to when the story says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from leto_elastic import wire
from leto_elastic.coordinator.leader import Mirror
from leto_elastic.coordinator.schema import (
    BudgetRecord,
    FailureRecord,
    Keys,
    NodeRecord,
    PlanRecord,
    Seat,
    SlotRecord,
    encode,
)
from leto_elastic.launch.actions import (
    Action,
    Death,
    End,
    HandOver,
    Kill,
    Publish,
    Recall,
    Report,
    Say,
    Send,
    Settled,
    Spawn,
    Stand,
)
from leto_elastic.launch.job import Job
from leto_elastic.launch.slots import Blob, Slot
from leto_elastic.launch.world import PlanView, World, code_of, position_among
from leto_elastic.recovery.ladder import Decision, decide
from leto_elastic.recovery.policy import FailureClass, Policy
from leto_elastic.state.header import Phase, Position
from leto_elastic.wire import StoreAddress
from tests.unit.test_coordinator_records import Etcd
from tests.unit.test_launch_job import FakeHeld

KEYS = Keys("job")
STAGES = ("stopped", "standing", "restored", "ready", "launched", "committed")


@dataclass
class Agent:
    """A node; `asked`: what its state machine asked for and nobody has done yet."""

    name: str
    job: Job
    held: list[FakeHeld]
    asked: list[Action] = field(default_factory=list)
    keys: int = 0

    def slot_of(self, rank: int) -> Slot:
        return next(slot for slot in self.job.slots if slot.rank == rank)

    def take(self, kind: type) -> list[Action]:
        taken = [action for action in self.asked if isinstance(action, kind)]
        self.asked = [action for action in self.asked if not isinstance(action, kind)]
        return taken


class Agents:
    """In the middle of training: every rank at `step`, protected, with a ready shadow unless `shadows` is false."""

    def __init__(self, policy: Policy, nodes: str, spares: str, slots: int, step: int, *, shadows: bool) -> None:
        self.policy = policy
        self.step = step
        self.now = 1000.0
        self.etcd = Etcd()
        self.mirror = Mirror(KEYS)
        self.leader = nodes[0]
        self._unheard = False
        self._held_up: list[tuple[int, Death]] = []
        self.told: list[tuple[str, int | None]] = []
        self.seats = tuple(Seat(node=name, slots=slots, domain=name, place=name) for name in nodes)
        self.code = code_of(policy, self.seats) or (0, 0)
        self.agents: dict[str, Agent] = {}
        for name in nodes + spares:
            self._tell((KEYS.node(name), encode(NodeRecord(host=name, pid=1, slots=slots))))
            held = [FakeHeld() for _ in range(slots)]
            for segments in held:
                segments.header.position = Position(step, Phase.COMPUTE)
            world = World(self.seats, position_among(self.seats, name))
            job = Job(held, shadows=shadows, restarts_left=0, world=world, staged=True)
            self.agents[name] = Agent(name, job, held)
        start = PlanRecord(
            epoch=0, action="start", repairs=(), store_host="", store_port=1, reason="", failures=(), step=0,
            time=0.0, nodes=self.seats,
        )  # fmt: skip
        self._tell(
            (KEYS.start, encode(start)),
            (KEYS.epoch, b"0"),
            (KEYS.leader, self.leader.encode()),
            (KEYS.budget, encode(BudgetRecord())),
        )
        for agent in self.agents.values():
            self._begin(agent)
        self.told.clear()

    def _begin(self, agent: Agent) -> None:
        job = agent.job
        if job.spare:
            self._do(agent, job.shadows_wanted())
            self._start_processes(agent)
            return
        for slot in job.slots:
            agent.keys += 1
            job.started(agent.keys, slot.index, "trainer", 100 + agent.keys)
            job.greeted(agent.keys)
            self._do(agent, job.recorded(agent.keys, Blob(10, 1)))
            self._do(agent, job.laid_out(agent.keys, Blob(20, 7, version=0)))
        for slot in job.slots:
            assert slot.trainer is not None
            self._do(agent, job.committed(slot.trainer.key, wire.Committed(0, self.step, "start", {}), 0.0))
            self._do(agent, [Publish(slot.index)])
        self._start_processes(agent)

    # ---- what happens

    def agent_of(self, rank: int) -> Agent:
        for agent in self.agents.values():
            if rank in agent.job.world.own:
                return agent
        raise KeyError(f"no living node has rank {rank}")

    def kill(self, rank: int, cause: FailureClass, detail: str, *, unheard: bool = False) -> None:
        """A rank's process ends: its trainer, or the one that is to be it; `unheard`: the report is held up."""
        self._unheard = unheard
        agent = self.agent_of(rank)
        slot = agent.slot_of(rank)
        member = slot.trainer or slot.standby
        assert member is not None, f"rank {rank} has no process"
        code = -9
        if cause in (FailureClass.OOM, FailureClass.HANG):
            slot.verdict, slot.detail = cause, detail
        elif cause is FailureClass.EXCEPTION:
            member.failing, code = detail or "an error", 1
        elif cause is FailureClass.EXIT:
            code = 3
        self._do(agent, agent.job.exited(member.key, code, self.now))
        self._unheard = False

    def damage(self, rank: int) -> None:
        """Its agent finds a checksum that is wrong."""
        agent = self.agent_of(rank)
        self._do(agent, agent.job.damaged([rank]))

    def lose(self, name: str) -> None:
        """A node is gone, and its lease has ended."""
        del self.agents[name]
        self.mirror.apply(self.etcd.delete(KEYS.node(name)))
        if self.leader == name:
            self.lead(min(agent.name for agent in self.agents.values() if not agent.job.spare))
            self.told.append((f"{self.leader} leads", None))
        for agent in list(self.agents.values()):
            position = position_among(agent.job.world.seats, name)
            if position is not None:
                self._do(agent, agent.job.node_gone(position, self.now))

    def lead(self, name: str) -> None:
        """Another node leads, and reads what there is."""
        self.leader = name
        self._tell((KEYS.leader, name.encode()))
        self.mirror = Mirror(KEYS)
        self.mirror.apply(self.etcd.snapshot())

    def report(self, epoch: int, death: Death, first: tuple[str, int | None] | None = None) -> bool:
        """A failure record; False when it comes too late or twice, as `Coordinator.report_failure` refuses it.

        `first` is told before anything that follows from it.
        """
        key = KEYS.failure(epoch, death.rank)
        if epoch != self.mirror.epoch or key in self.etcd.entries:
            return False
        record = FailureRecord(
            rank=death.rank, slot=death.rank, pid=death.pid, cause=death.cause, step=death.step, time=self.now,
            detail=death.detail,
        )  # fmt: skip
        self._tell((key, encode(record)))
        self.told += [] if first is None else [first]
        for agent in list(self.agents.values()):
            self._do(agent, agent.job.failed_elsewhere(epoch, death, self.now))
        return True

    def arrive(self) -> None:
        """What was held up is heard now, and may be too late."""
        held_up, self._held_up = self._held_up, []
        for epoch, death in held_up:
            self.report(epoch, death)

    def decide(self) -> Decision:
        """The leader decides, and writes the plan, of which every node hears."""
        view = self.mirror.view(self.policy, 0, self.now, self.code)
        decision = decide(self.policy, view)
        if decision.action == "wait":
            return decision
        plan, _ = self.mirror.planned_by(decision, view, ("h", 1), self.now)
        budget = self.mirror.budget_after(decision)
        self._tell(
            (KEYS.plan(plan.epoch), encode(plan)),
            (KEYS.epoch, str(plan.epoch).encode()),
            (KEYS.budget, encode(budget)),
        )
        self.seats = plan.nodes
        deaths = tuple(Death(f.rank, f.slot, f.pid, 0, f.cause, f.step, "", 0, f.detail) for f in plan.failures)
        repairs = {repair.rank: repair.action for repair in plan.repairs}
        for agent in list(self.agents.values()):
            world = World(plan.nodes, position_among(plan.nodes, agent.name), plan.generation)
            told = PlanView(plan.epoch, plan.action, repairs, StoreAddress("h", 1), plan.reason, world, deaths)
            agent.take(Stand)  # of an older epoch
            self._do(agent, agent.job.plan(told, self.now))
        return decision

    # ---- the way into an epoch

    def go(self, stage: str) -> bool:
        """On to a stage of the way into the present epoch; False when it is not reached."""
        first = STAGES.index("committed") if self.launched else 0
        return all(getattr(self, f"_until_{name}")() for name in STAGES[first : STAGES.index(stage) + 1])

    @property
    def members(self) -> list[Agent]:
        return [agent for agent in self.agents.values() if not agent.job.spare]

    def _until_stopped(self) -> bool:
        for agent in self.members:
            for slot in agent.job.slots:
                if slot.trainer is not None and not slot.trainer.parked and not agent.job._launched:
                    self._do(agent, agent.job.parked(slot.trainer.key, self.now))
        return all(s.trainer is None or s.trainer.parked for a in self.members for s in a.job.slots)

    @property
    def launched(self) -> bool:
        return all(agent.job._launched and not agent.job._aborted for agent in self.members)

    def _until_standing(self) -> bool:
        for agent in self.members:
            for action in agent.take(Stand):
                assert isinstance(action, Stand)
                agent.asked.append(Say(action.epoch, "standing"))
        return self._said("standing")

    def _said(self, stage: str) -> bool:
        return all(agent.job._stood if stage == "standing" else agent.job._readied for agent in self.members) and len(
            self.members
        ) == len(self.seats)

    def _until_restored(self) -> bool:
        for agent in self.members:
            if agent.job._restored or not self._said("standing"):
                continue
            lost = {slot.index: Blob(30, 7, version=1) for slot in agent.job.slots if slot.lost}
            if lost:
                ranks = [agent.job.slots[index].rank for index in lost]
                self.told += [(f"{agent.name}: has restored the state of", rank) for rank in ranks]
            self._do(agent, agent.job.restored(agent.job.epoch, None, lost, self.now))
        return all(agent.job._restored for agent in self.members)

    def _until_ready(self) -> bool:
        for agent in self.members:
            for action in agent.take(Recall):
                assert isinstance(action, Recall)
                self._do(agent, agent.job.recalled(action.slot, Blob(40, 1)))
            self._start_processes(agent)
        return self._said("ready")

    def _start_processes(self, agent: Agent) -> None:
        """Those that were asked for run, and all get as far as they can."""
        for action in agent.take(Spawn):
            assert isinstance(action, Spawn)
            agent.keys += 1
            self._do(agent, agent.job.started(agent.keys, action.slot, action.kind, 100 + agent.keys))
        for slot in agent.job.slots:
            member = slot.standby
            if agent.job.spare or member is None or member.ready or slot.lost:
                continue
            if not member.greeted:
                agent.job.greeted(member.key)
            self._do(agent, agent.job.rehearsed(member.key))
            self._do(agent, agent.job.ready(member.key, self.now))

    def _until_launched(self) -> bool:
        if not self._said("ready"):
            return False
        for agent in self.members:
            self._do(agent, agent.job.all_ready(agent.job.epoch, self.now))
        return self.launched

    def _until_committed(self) -> bool:
        """Everyone commits the step, and shadows are started where they are missing."""
        if not self.launched:
            return False
        self.step += 1
        for agent in self.members:
            for slot in agent.job.slots:
                assert slot.trainer is not None
                agent.held[slot.index].header.position = Position(self.step, Phase.COMPUTE)
                commit = wire.Committed(agent.job.epoch, self.step, "rerun", {})
                self._do(agent, agent.job.committed(slot.trainer.key, commit, self.now))
            told, self.told = self.told, []
            self._start_processes(agent)
            self.told = told
        return True

    # ---- what agents ask for

    def _do(self, agent: Agent, actions: Iterable[Action]) -> None:
        for action in actions:
            line, rank = self._line(agent, action)
            if line:
                self.told.append((f"{agent.name}: {line}", rank))
            self._carry_out(agent, action)

    def _carry_out(self, agent: Agent, action: Action) -> None:
        match action:
            case Publish(slot=index) if not agent.job.spare:
                slot = agent.job.slots[index]
                record = SlotRecord(
                    rank=slot.rank, pid=1, leto=True, protected=slot.protected, shadow=slot.shadow,
                    finished=slot.finished,
                )  # fmt: skip
                self._tell((KEYS.slot(slot.rank), encode(record)))
            case Report(epoch=epoch, death=death):
                line, rank = self.told.pop()
                if self._unheard:
                    self.told.append((line.replace("reports", "reports, not heard yet"), rank))
                    self._held_up.append((epoch, death))
                    return
                if self.report(epoch, death, first=(line, rank)):
                    return
                why = "it is known" if epoch == self.mirror.epoch else "it is too late"
                self.told.append((line.replace("reports", f"reports what is of no effect, {why}"), rank))
            case Kill(key=key):
                self._do(agent, agent.job.exited(key, -9, self.now))
            case Spawn() | Stand() | Recall():
                agent.asked.append(action)

    def _line(self, agent: Agent, action: Action) -> tuple[str, int | None]:
        """What an action looks like in a story, and the rank that it concerns; "" for what does not matter there."""
        match action:
            case Send(key=key, message=wire.Abort()):
                return "aborts", self._rank(agent, key)
            case Send(key=key, message=wire.Plan(epoch=epoch)):
                return f"goes into epoch {epoch} with", self._rank(agent, key)
            case HandOver(key=key, message=message):
                return f"goes into epoch {message.epoch} with the new", self._rank(agent, key)
            case Report(epoch=epoch, death=death):
                return f"reports ({death.cause}, epoch {epoch})", death.rank
            case Spawn(slot=index, kind="respawn"):
                return "starts a process for", agent.job.slots[index].rank
            case Stand(epoch=epoch):
                return f"stands still on the way into epoch {epoch}", None
            case Say(epoch=epoch, stage=stage):
                return f"is {stage} for epoch {epoch}", None
            case Recall(slot=index):
                return "asks the keepers for", agent.job.slots[index].rank
            case Kill(key=key):
                return "kills", self._rank(agent, key)
            case Settled(epoch=epoch):
                return f"has committed in epoch {epoch}", None
            case End(reason=reason):
                return "ends" if reason is None else "ends with a failure", None
        return "", None

    def _rank(self, agent: Agent, key: int) -> int:
        return agent.job.slots[agent.job.members[key].slot].rank

    def _tell(self, *puts: tuple[str, bytes]) -> None:
        self.mirror.apply(self.etcd.put(*puts))

    def news(self) -> str:
        """What was told since the last time; what a node does alike with several ranks is one line."""
        lines: dict[str, list[int]] = {}
        for line, rank in self.told:
            lines.setdefault(line, []).extend([] if rank is None else [rank])
        self.told.clear()
        return "\n".join(_with_ranks(line, ranks) for line, ranks in lines.items())


def _with_ranks(line: str, ranks: list[int]) -> str:
    if not ranks:
        return line
    return f"{line} {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
