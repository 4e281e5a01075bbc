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
from collections.abc import Coroutine
from typing import Any, TypeVar

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from leto_elastic import wire
from leto_elastic.errors import NotEnoughMemory
from leto_elastic.launch import actions as act
from leto_elastic.launch.crew import Crew
from leto_elastic.launch.crew import Job as Order
from leto_elastic.launch.deciding import Decider, SlotState
from leto_elastic.launch.forker import Forker
from leto_elastic.launch.job import Job, PlanView
from leto_elastic.launch.logs import Logs, open_shadow_log
from leto_elastic.launch.posix import may_lower_niceness
from leto_elastic.launch.process import Exit
from leto_elastic.launch.segments import Memory, MemoryGauge, Segments
from leto_elastic.launch.slots import Blob, Member
from leto_elastic.launch.stores import Stores
from leto_elastic.launch.terms import Host, Interrupted, Outcome, Settings
from leto_elastic.observe import report
from leto_elastic.observe.events import EventLog

_GAUGE_SECONDS = 1.0

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
    """

    def __init__(
        self,
        settings: Settings,
        host: Host,
        decider: Decider,
        events: EventLog,
        forker: Forker | None = None,
        memory: Memory | None = None,
    ) -> None:
        self._settings = settings
        self._policy = settings.policy
        self._host = host
        self._decider = decider
        self._events = events
        memory = memory or Memory()
        self._gauge = MemoryGauge(self._policy.shadow, memory)
        self._held = [Segments(slot, memory) for slot in range(settings.world_size)]
        self._stores = Stores(self._policy.deadlines.collective)
        self._forker = forker or Forker(self._policy.deadlines.start)
        self._failures: dict[int, ProcessFailure] = {}
        self._shadow_logs = 0
        self._spawning: dict[int, tuple[int, act.Kind]] = {}
        self._logs: Logs | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._job = self._new_job(0, 0)

    async def run(self) -> Outcome:
        """The job, start to end. Raises Interrupted after a death signal, LetoError when it cannot run."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._unhandled)
        self._over: asyncio.Future[Outcome] = self._loop.create_future()
        self._crew = Crew(self._forker, self)
        state = "broken"
        try:
            epoch = await self._unless_over(self._open())
            outcome = await self._attempts(epoch)
            state = "succeeded" if outcome.reason is None else "failed"
            return outcome
        except Interrupted:
            state = "interrupted"
            raise
        finally:
            await self._close(state == "succeeded")
            self._events.write("run_finished", state=state)

    async def _open(self) -> int:
        """The zygote's imports and the decider's start take their time together. Returns the job's epoch."""
        forker = self._loop.create_task(self._forker.start())
        try:
            epoch = await self._decider.open(self._plan_arrived, self._make_store, self.broken)
            await forker
            return epoch
        finally:
            forker.cancel()
            await asyncio.gather(forker, return_exceptions=True)

    async def _attempts(self, epoch: int) -> Outcome:
        attempt = 0
        while True:
            self._start_group(attempt, epoch)
            try:
                outcome = await self._over
                await self._stop(signal.SIGTERM if outcome.reason else signal.SIGKILL)
                return outcome
            except _Restarting as why:
                await self._stop(signal.SIGTERM)
                self._end_attempt()
                attempt += 1
                self._emit("restart", {"reason": str(why), "attempt": attempt})
                self._over = self._loop.create_future()
            except Interrupted as signalled:
                await self._stop(signalled.number)
                raise

    def _new_job(self, attempt: int, epoch: int) -> Job:
        restarts = self._settings.max_restarts - attempt
        return Job(self._held, shadows=self._policy.shadow.per_slot > 0, restarts_left=restarts, epoch=epoch)

    def _start_group(self, attempt: int, epoch: int) -> None:
        self._job = self._new_job(attempt, epoch)
        self._store = self._stores.fresh()
        self._host.group_starting(attempt)
        ranks = range(self._settings.world_size)
        added = {rank: self._host.worker_env(rank, attempt, self._store) for rank in ranks}
        self._logs = self._host.make_logs(added)
        self._envs = {rank: {**os.environ, **env} for rank, env in added.items()}
        self._do([act.Spawn(rank, "trainer") for rank in ranks])
        self._logs.start()
        self._ticking = self._loop.call_later(_GAUGE_SECONDS, self._tick)

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

    async def _close(self, succeeded: bool) -> None:
        try:
            await self._stop(signal.SIGKILL)
        finally:
            self._loop.set_exception_handler(None)
            self._end_attempt()
            self._crew.close()
            self._stores.close()
            await self._forker.close()
            await self._decider.close(succeeded)
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
        job = self._job
        if job.over:
            self._crew.signal(key, signal.SIGKILL)
            return
        deadlines = self._policy.deadlines
        if kind != "trainer":
            self._crew.deadline(key, deadlines.respawn if kind == "respawn" else deadlines.start + deadlines.rehearse)
        self._do(job.started(key, slot, kind, pid))
        if kind == "trainer":
            self._host.trainer_started(slot, pid)

    def process_exited(self, key: int, pid: int, end: Exit) -> None:
        member = self._job.members.get(key)
        if member is None or self._job.over:
            return
        slot = self._job.slots[member.slot]
        trainer = member.kind == "trainer"
        self._do(self._job.exited(key, end.code, end.noticed))
        assert self._logs is not None
        if trainer and not slot.done:
            self._failures.pop(slot.rank, None)
            self._failures[slot.rank] = _process_failure(slot.index, pid, end.code, self._logs.error_file(slot.index))
        if not self._job.over:
            self._logs.forget_error(slot.index)

    def process_greeted(self, key: int) -> None:
        member = self._job.members.get(key)
        if member is not None:
            self._greet(member)

    def _greet(self, member: Member) -> None:
        job, settings = self._job, self._settings
        slot = job.slots[member.slot]
        shadow = member.kind != "trainer"
        welcome = wire.Welcome(
            role="shadow" if shadow else "trainer",
            rank=slot.rank,
            world_size=settings.world_size,
            local_rank=slot.index,
            local_world_size=settings.world_size,
            slot=slot.index,
            epoch=job.epoch,
            run_id=settings.run_id,
            run_dir=settings.run_dir,
            store=self._store,
            policy=self._policy.encode(),
        )
        fds = (slot.record.fd,) if shadow and slot.record is not None else ()
        self._crew.send(member.key, welcome, fds)
        job.greeted(member.key)

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
                self._do(job.recorded(key, Blob(fds.pop(), message.size)))
            case wire.Manifest():
                self._keep(job.slots[member.slot].manifest, fds)
                self._do(job.laid_out(key, Blob(fds.pop(), message.size, message.version)))
            case wire.Committed():
                self._do(job.committed(key, message, now))
            case wire.Rehearsed():
                self._do(job.rehearsed(key))
            case wire.Ready():
                self._crew.deadline(key, None)
                self._do(job.ready(key, now))
            case wire.Unfit():
                self._do(job.unfit(key, message.reason))
            case wire.Finished():
                self._do(job.finish(key))
            case wire.Failing():
                job.failing(key, message.reason)
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

    def _plan_arrived(self, plan: PlanView) -> None:
        self._store = plan.store
        self._do(self._job.plan(plan, time.monotonic()))

    async def _make_store(self, _epoch: int) -> tuple[str, int]:
        address = self._stores.make()
        return address.host, address.port

    def _tick(self) -> None:
        self._ticking = self._loop.call_later(_GAUGE_SECONDS, self._tick)
        if self._job.protected and not self._job.over:
            self._do(self._job.memory(self._gauge.short(time.monotonic())))

    # ---- actions

    def _do(self, actions: list[act.Action]) -> None:
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
                self._crew.deadline(action.key, self._policy.deadlines.respawn)
            case act.Kill():
                self._crew.signal(action.key, signal.SIGKILL)
            case act.Publish():
                self._publish(action.slot)
            case act.Emit():
                self._emit(action.event, action.fields)
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
            own = stdout = stderr = open_shadow_log(self._settings.run_dir, slot, self._shadow_logs)
            self._shadow_logs += 1
        nice = self._policy.shadow.nice if kind == "shadow" and may_lower_niceness() else 0
        key = self._crew.spawn(Order(self._settings.entry, slot, self._envs[slot], nice, stdout, stderr))
        self._spawning[key] = (slot, kind)
        if own is not None:
            os.close(own)

    def _publish(self, index: int) -> None:
        slot = self._job.slots[index]
        pid = slot.trainer.pid if slot.trainer is not None else 0
        state = SlotState(index, slot.rank, pid, self._job.leto, slot.protected, slot.shadow, slot.finished)
        self._decider.publish(state)

    def _emit(self, event: str, fields: dict[str, object]) -> None:
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
