"""The shell around `Job`: real processes, connections, descriptors and time.

Everything runs in one thread, in one event loop. An exception in any callback ends the job with that exception, because
an agent that half works would leave ranks waiting for ever.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from leto_elastic import wire
from leto_elastic.errors import LetoError, NotEnoughMemory
from leto_elastic.launch import actions as act
from leto_elastic.launch.crew import Crew
from leto_elastic.launch.crew import Job as Order
from leto_elastic.launch.deciding import STALLED, Decider, SlotState
from leto_elastic.launch.forker import Forker
from leto_elastic.launch.job import Job
from leto_elastic.launch.logs import Logs, open_shadow_log
from leto_elastic.launch.oom import OomWatch
from leto_elastic.launch.posix import may_lower_niceness
from leto_elastic.launch.process import Exit
from leto_elastic.launch.protection import Protection
from leto_elastic.launch.retention import Found, Retention
from leto_elastic.launch.segments import Memory, MemoryGauge, Segments
from leto_elastic.launch.slots import Blob, Member
from leto_elastic.launch.stores import Stores
from leto_elastic.launch.terms import Host, Interrupted, Outcome, Settings
from leto_elastic.launch.together import Fenced, Together
from leto_elastic.launch.watching import Watching
from leto_elastic.launch.world import PlanView, World
from leto_elastic.observe import report
from leto_elastic.observe.events import EventLog

_GAUGE_SECONDS = 1.0
_NOT_AVAILABLE = "N/A"  # torch's path of an error file that is not there

T = TypeVar("T")


class _Restarting(Exception):
    """The group is to be started again; the message says why."""


class Supervisor:
    """Runs one job to its end.

    Args:
        settings: of the job.
        host: torchrun's side.
        decider: what to do about failures.
        events: where events go.
        forker: starts processes.
        memory: says how much memory is left.
        protection: of the state against lost memory, in a job of several nodes.
        retention: of the state in files; None keeps it in this process's memory.
    """

    def __init__(
        self,
        settings: Settings,
        host: Host,
        decider: Decider,
        events: EventLog,
        forker: Forker | None = None,
        memory: Memory | None = None,
        protection: Protection | None = None,
        retention: Retention | None = None,
    ) -> None:
        self._settings = settings
        self._policy = settings.policy
        self._host = host
        self._decider = decider
        self._events = events
        self._protection = protection
        memory = memory or Memory()
        self._gauge = MemoryGauge(self._policy.shadow, memory)
        self._oom = OomWatch(memory)
        self._retention = retention
        self._found: Found | None = None  # of the run's state, not taken up yet
        make = retention.make if retention is not None else None
        self._held = [Segments(slot, memory, make) for slot in range(settings.slots)]
        self._stores = Stores(self._policy.deadlines.collective, settings.address)
        self._forker = forker or Forker(self._policy.deadlines.start)
        self._failures: dict[int, ProcessFailure] = {}
        self._shadow_logs = 0
        self._spawning: dict[int, tuple[int, act.Kind]] = {}
        self._logs: Logs | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._together = Together(self, decider, protection, self._held)
        self._watching = Watching(self, decider, settings)
        self._early: list[Callable[[], None]] | None = []  # what was heard before the group was started
        self._plan = PlanView(0, "start", {}, wire.StoreAddress("", 0), "", World.alone(settings.slots))
        self._attempt = 0
        self._job = self._new_job()

    async def run(self) -> Outcome:
        """The job, start to end. Raises Interrupted after a death signal, LetoError when it cannot run."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._unhandled)
        self._over: asyncio.Future[Outcome] = self._loop.create_future()
        self._crew = Crew(self._forker, self)
        self._watching.start()
        if self._protection is not None:
            self._protection.listen(self)
        state, reason = "broken", ""
        try:
            outcome = await self._rounds()
            state, reason = "succeeded" if outcome.reason is None else "failed", outcome.reason or ""
            return outcome
        except Interrupted:
            state = "interrupted"
            raise
        except LetoError as error:
            reason = str(error)
            raise
        finally:
            leaves = state == "interrupted" and self._job.several
            await self._close(None if leaves else state == "succeeded", reason or state)
            self._events.write("run_finished", state=state)

    async def _rounds(self) -> Outcome:
        """Take part until the end; again, as a spare, when the job has gone on without this node."""
        while True:
            self._early = []
            self._plan = await self._unless_over(self._open())
            try:
                return await self._attempts()
            except Fenced as why:
                await self._stop(signal.SIGKILL)
                self._end_attempt()
                self.emit("fenced", {"reason": str(why)})
                if self._protection is not None:
                    self._protection.forget()
                await self._decider.close(None)
                self._over = self._loop.create_future()

    async def _open(self) -> PlanView:
        """The zygote's imports and the decider's start take their time together."""
        forker = self._loop.create_task(self._forker.start())
        try:
            if self._retention is not None:
                self._found = await asyncio.to_thread(self._retention.take)
            plan = await self._decider.open(self, self._make_store)
            await forker
            return plan
        finally:
            forker.cancel()
            await asyncio.gather(forker, return_exceptions=True)

    async def _attempts(self) -> Outcome:
        while True:
            self._start_group()
            early, self._early = self._early or [], None
            for heard in early:
                heard()
            try:
                outcome = await self._over
                await self._stop(signal.SIGTERM if outcome.reason else signal.SIGKILL)
                return outcome
            except _Restarting as why:
                await self._stop(signal.SIGTERM)
                self._end_attempt()
                self._attempt += 1
                if self._retention is not None:
                    self._retention.begin()
                self.emit("restart", {"reason": str(why), "attempt": self._attempt})
                self._over = self._loop.create_future()
            except Interrupted as signalled:
                await self._stop(signalled.number)
                raise

    def _new_job(self) -> Job:
        return Job(
            self._held,
            shadows=self._policy.shadow.per_slot > 0,
            restarts_left=self._settings.max_restarts - self._attempt,
            epoch=self._plan.epoch,
            world=self._plan.world,
            staged=self._protection is not None,
        )

    def _start_group(self) -> None:
        job = self._job = self._new_job()
        self._store = self._plan.store if job.several or job.spare else self._stores.fresh()
        self._host.group_starting(self._attempt, job.world)
        added = self._environments()
        self._logs = self._host.make_logs(added)
        self._envs = {index: {**os.environ, **env} for index, env in added.items()}
        if self._protection is not None:
            self._protection.configure(self._plan)
        if job.spare:
            self.emit("spare", {"slots": len(job.slots)})
            self.do(job.shadows_wanted())
        elif self._found is not None:
            found, self._found = self._found, None
            self.do(found.into(job, self._held, self._store))
        else:
            self.do([act.Spawn(slot.index, "trainer") for slot in job.slots])
        self._logs.start()
        self._ticking = self._loop.call_later(_GAUGE_SECONDS, self._tick)

    def placed(self) -> None:
        self._envs = {index: {**os.environ, **env} for index, env in self._environments().items()}

    def _environments(self) -> dict[int, dict[str, str]]:
        world = self._job.world
        return {s.index: self._host.worker_env(s.index, self._attempt, self._store, world) for s in self._job.slots}

    def _end_attempt(self) -> None:
        """After the group has been stopped: forget everything about it."""
        if self._ticking is not None:
            self._ticking.cancel()
        if self._logs is not None:
            self._logs.close()
            self._logs = None
        for slot in self._job.slots:
            for blob in (slot.record, slot.manifest):
                if blob is not None:
                    os.close(blob.fd)
            slot.record = slot.manifest = None
        for segments in self._held:
            segments.clear()

    async def _close(self, succeeded: bool | None, reason: str) -> None:
        try:
            await self._stop(signal.SIGKILL)
        finally:
            self._loop.set_exception_handler(None)
            self._together.close()
            self._watching.close()
            if self._retention is not None:
                self._retention.end(self._job, succeeded=bool(succeeded))
            self._end_attempt()
            self._crew.close()
            self._stores.close()
            await self._forker.close()
            await self._decider.close(succeeded, reason)
            if self._protection is not None:
                self._protection.close()
            if self._over.done() and not self._over.cancelled():
                self._over.exception()  # seen, whoever awaited it

    async def _unless_over(self, opening: Coroutine[Any, Any, T]) -> T:
        """Wait for something at the start, but not beyond a death signal."""
        task = self._loop.create_task(opening)
        await asyncio.wait((asyncio.ensure_future(task), self._over), return_when=asyncio.FIRST_COMPLETED)
        if self._over.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._over.result()
        return task.result()

    @property
    def job(self) -> Job:
        """The present start of the group."""
        return self._job

    # ---- the end of things

    def interrupt(self, number: int) -> None:
        """A death signal for the agent: ends the job; a second one does not wait for the workers any more."""
        if self._over.done():
            self._crew.kill_all()
        self.broken(Interrupted(number))

    def forward(self, number: int) -> None:
        """Pass a signal on to the trainers."""
        for slot in self._job.slots:
            if slot.trainer is not None:
                self._crew.signal(slot.trainer.key, number, group=False)

    def broken(self, error: BaseException) -> None:
        """End the job with this."""
        if not self._over.done():
            self._over.set_exception(error)

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        if isinstance(error, Exception):
            self.broken(error)
        else:
            loop.default_exception_handler(context)

    async def _stop(self, number: int) -> None:
        job = self._job
        job.over = True

        def standby(key: int) -> bool:
            member = job.members.get(key)
            kind = member.kind if member is not None else self._spawning.get(key, (0, "shadow"))[1]
            return kind != "trainer"

        await self._crew.stop(number, self._settings.shutdown, standby)

    # ---- processes

    def process_started(self, key: int, pid: int) -> None:
        slot, kind = self._spawning.pop(key)
        self._oom.joined(pid)
        job = self._job
        if job.over:
            self._crew.signal(key, signal.SIGKILL)
            return
        deadlines = self._policy.deadlines
        if kind != "trainer" and not job.spare:
            respawn = self._respawn_deadline(job.slots[slot].lost)
            self._crew.deadline(key, respawn if kind == "respawn" else deadlines.start + deadlines.rehearse)
        self.do(job.started(key, slot, kind, pid))
        if kind == "trainer":
            self._host.trainer_started(slot, pid)

    def _respawn_deadline(self, lost: bool) -> float:
        deadlines = self._policy.deadlines
        return deadlines.respawn + (deadlines.restore if lost else 0.0)

    def process_exited(self, key: int, pid: int, end: Exit) -> None:
        member = self._job.members.get(key)
        killed = self._oom.ended(pid, end.code, time.monotonic(), member.failing if member is not None else None)
        if member is None or self._job.over:
            return
        slot = self._job.slots[member.slot]
        trainer = member.kind == "trainer"
        if killed is not None:
            slot.killed_for_memory(member, killed)
        self.do(self._job.exited(key, end.code, end.noticed))
        if (killed is not None or member.oom) and not self._job.over:
            self.do(self._job.memory(self._gauge.hit(time.monotonic())))
        assert self._logs is not None
        if trainer and not slot.done:
            failure = _process_failure(slot.index, pid, end.code, self._logs.error_file(slot.index))
            known = self._failures.pop(slot.rank, failure)  # the first traceback is the one to show
            self._failures[slot.rank] = failure if known.error_file in ("", _NOT_AVAILABLE) else known
        if not self._job.over:
            self._logs.forget_error(slot.index)

    def process_greeted(self, key: int) -> None:
        member = self._job.members.get(key)
        if member is not None:
            self._oom.joined(member.pid)
            self._job.greeted(key)
            if member.kind == "trainer" or self._job.slots[member.slot].record is not None:
                self._greet(member)

    def _greet(self, member: Member) -> None:
        job, settings = self._job, self._settings
        slot = job.slots[member.slot]
        shadow = member.kind != "trainer"
        welcome = wire.Welcome(
            role="shadow" if shadow else "trainer",
            rank=slot.rank,
            world_size=job.world.size,
            local_rank=slot.index,
            local_world_size=settings.slots,
            slot=slot.index,
            epoch=job.epoch,
            run_id=settings.run_id,
            run_dir=settings.run_dir,
            store=self._store,
            policy=self._policy.encode(),
            address=settings.address if job.several else "",
            protect=self._protection.buffers if self._protection is not None else 0,
            every=self._policy.protect.global_.every,
            generation=job.world.generation,
        )
        fds = (slot.record.fd,) if shadow and slot.record is not None else ()
        self._crew.send(member.key, welcome, fds)

    # ---- messages

    def message_arrived(self, key: int, message: wire.FromWorker, fds: list[int]) -> None:
        member = self._job.members.get(key)
        if member is None or self._job.over:
            _close_all(fds)
            return
        job, now = self._job, time.monotonic()
        match message:
            case wire.Alloc():
                self._alloc(member, message)
            case wire.SetupRecord():
                self._keep(job.slots[member.slot].record, fds)
                record = Blob(fds.pop(), message.size)
                if self._protection is not None:
                    self._protection.recorded(job.slots[member.slot].rank, record)
                if self._retention is not None:
                    self._retention.keep(member.slot, "record", record)
                self.do(job.recorded(key, record))
            case wire.Manifest():
                self._keep(job.slots[member.slot].manifest, fds)
                manifest = Blob(fds.pop(), message.size, message.version)
                if self._protection is not None:
                    self._protection.laid_out(job.slots[member.slot].rank, manifest, self._held[member.slot])
                if self._retention is not None:
                    self._retention.keep(member.slot, "manifest", manifest)
                self.do(job.laid_out(key, manifest))
            case wire.Stepped() | wire.Due():
                if self._protection is not None:
                    self._protection.advanced(job.slots[member.slot].rank, message)
            case wire.Parked():
                self.do(job.parked(key, now))
            case wire.Committed():
                self.do(job.committed(key, message, now))
            case wire.Rehearsed():
                self.do(job.rehearsed(key))
            case wire.Ready():
                self._crew.deadline(key, None)
                self.do(job.ready(key, now))
            case wire.Unfit():
                self.do(job.unfit(key, message.reason))
            case wire.Finished():
                self.do(job.finish(key))
            case wire.Failing():
                job.failing(key, message.reason, oom=message.oom)
            case wire.Raised():
                self.do(job.raised(key, message, now))
            case wire.Quitting():
                job.quitting(key, message.reason)
            case wire.Skipped():
                self.do(job.skipped(message.step, message.reason))
            case wire.Suspect():
                fields = {"rank": job.slots[member.slot].rank, "epoch": message.epoch, "reason": message.reason}
                self._events.write("suspect", **fields)
            case wire.Hello():
                pass
        _close_all(fds)

    def _keep(self, old: Blob | None, fds: list[int]) -> None:
        if len(fds) != 1:
            raise ValueError(f"a message came with {len(fds)} descriptors instead of 1")
        if old is not None:
            os.close(old.fd)

    def _alloc(self, member: Member, message: wire.Alloc) -> None:
        try:
            fd = self._held[member.slot].alloc(message.name, message.size)
        except NotEnoughMemory as error:
            self._crew.send(member.key, wire.Refused(str(error)))
        else:
            self._crew.send(member.key, wire.Segment(message.name, message.size), (fd,))

    # ---- plans, memory

    def plan_arrived(self, plan: PlanView) -> None:
        if self._early is not None:
            self._early.append(lambda: self.plan_arrived(plan))
            return
        job, placed = self._job, plan.world.position is not None
        if job.over:
            return
        self._plan, self._store = plan, plan.store
        if not placed and not job.spare:
            self.broken(Fenced(f"epoch {plan.epoch} was made without this node ({plan.reason})"))
            return
        if placed and self._protection is not None and plan.action == "repair":
            self._protection.configure(plan)
        self.do(job.plan(plan, time.monotonic()))

    def rank_failed(self, epoch: int, death: act.Death) -> None:
        if self._early is not None:
            self._early.append(lambda: self.rank_failed(epoch, death))
            return
        self.do(self._job.failed_elsewhere(epoch, death, time.monotonic()))

    def node_gone(self, position: int) -> None:
        if self._early is not None:
            self._early.append(lambda: self.node_gone(position))
            return
        self._together.doubt(position)

    def met(self, epoch: int, stage: str, said: Mapping[int, bytes]) -> None:
        (self._watching.met(epoch, said) if stage == STALLED else self._together.met(epoch, stage, said))

    def ended(self, reason: str | None) -> None:
        if self._early is not None:
            self._early.append(lambda: self.ended(reason))
        elif not self._job.over and self._job.ending is None and (reason is not None or self._job.spare):
            self.do([act.End(None if reason is None else f"another node ended the job: {reason}")])

    async def _make_store(self, _epoch: int, fresh: bool = False) -> tuple[str, int]:
        address = self._stores.fresh() if fresh else self._stores.make()
        return address.host, address.port

    def _tick(self) -> None:
        self._ticking = self._loop.call_later(_GAUGE_SECONDS, self._tick)
        self._together.look_around(self._policy.deadlines.replace)
        self._oom.look(time.monotonic())
        if self._job.protected and not self._job.over:
            self.do(self._job.memory(self._gauge.short(time.monotonic())))

    # ---- actions

    def do(self, actions: Sequence[act.Action]) -> None:
        for action in actions:
            self._one(action)

    def _one(self, action: act.Action) -> None:
        match action:
            case act.Send():
                self._crew.send(action.key, action.message, action.fds)
            case act.HandOver():
                assert self._logs is not None
                member = self._job.members[action.key]
                self._crew.renice(action.key, 0)
                self._crew.send(action.key, action.message, self._logs.streams(member.slot))
                self._host.trainer_started(member.slot, member.pid)
            case act.Report():
                self._decider.report(action.epoch, action.death)
            case act.Spawn():
                self._spawn(action.slot, action.kind)
            case act.Warn():
                self._crew.renice(action.key, 0)
                self._crew.send(action.key, wire.Prepare())
            case act.Hurry():
                self._crew.renice(action.key, 0)
                lost = self._job.slots[self._job.members[action.key].slot].lost
                self._crew.deadline(action.key, self._respawn_deadline(lost))
            case act.Kill():
                self._crew.signal(action.key, signal.SIGKILL)
            case act.Surrender():
                self._crew.send(action.key, wire.Surrender())
                self._crew.deadline(action.key, self._policy.deadlines.shutdown)
            case act.Welcome():
                self._greet(self._job.members[action.key])
            case act.Recall():
                self._together.recall(action.slot)
            case act.Stand():
                self._together.stand(action.epoch)
            case act.Say():
                self._decider.say(action.epoch, action.stage, b"")
            case act.Publish():
                self._publish(action.slot)
            case act.Emit():
                self.emit(action.event, action.fields)
            case act.Settled():
                self._failures.clear()
            case act.Restart():
                self.broken(_Restarting(action.reason))
            case act.End():
                if not self._over.done():
                    self._loop.call_soon(self._finish, action.reason)

    def _finish(self, reason: str | None) -> None:
        """Called after the exit that ended the job was noted with all its details."""
        if not self._over.done():
            self._over.set_result(Outcome(reason, dict(self._failures)))

    def _spawn(self, slot: int, kind: act.Kind) -> None:
        assert self._logs is not None
        stdout, stderr = self._logs.streams(slot)
        own = None
        if kind != "trainer":
            own = stdout = stderr = open_shadow_log(self._settings.logs, slot, self._shadow_logs)
            self._shadow_logs += 1
        nice = self._policy.shadow.nice if kind == "shadow" and may_lower_niceness() else 0
        key = self._crew.spawn(Order(self._settings.entry, slot, self._envs[slot], nice, stdout, stderr))
        self._spawning[key] = (slot, kind)
        if own is not None:
            os.close(own)

    def _publish(self, index: int) -> None:
        slot = self._job.slots[index]
        if self._job.spare:
            return
        pid = slot.trainer.pid if slot.trainer is not None else 0
        state = SlotState(index, slot.rank, pid, self._job.leto, slot.protected, slot.shadow, slot.finished)
        self._decider.publish(state)

    def emit(self, event: str, fields: dict[str, object]) -> None:
        self._events.write(event, **fields)
        line = report.line({"event": event, **fields})
        if line is not None:
            print(line, file=sys.stderr, flush=True)


def _process_failure(local_rank: int, pid: int, code: int, error_file: str) -> ProcessFailure:
    try:
        return ProcessFailure(local_rank, pid, code, error_file)
    except (OSError, ValueError, KeyError, TypeError):  # it died while writing its error file
        return ProcessFailure(local_rank, pid, code, "")


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
