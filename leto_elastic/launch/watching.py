"""Watches the trainers of this node for hangs, and ends one that is to blame; its end is then repaired as any other.

Some forty times a second the headers are read, which are memory of this process. A trainer that is silent is ended by
the agent that sees it. When no trainer here gets on, the others are asked: in a job of several nodes each agent whose
trainers stall says where they stand, and takes that back when they go on. Once all have said so, every agent comes to
the same verdict from the same words, and the one with the rank in question acts. That takes etcd, and without it a job
that hangs goes on hanging, as any failure waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec

from leto_elastic.launch import actions as act
from leto_elastic.launch import stacks
from leto_elastic.launch.culprit import Standing, Verdict, culprit
from leto_elastic.launch.deciding import STALLED, Decider
from leto_elastic.launch.job import Job
from leto_elastic.launch.slots import HeaderView, Member, Slot
from leto_elastic.launch.terms import Settings
from leto_elastic.launch.together import Shell
from leto_elastic.launch.watch import Finding, Watch
from leto_elastic.observe.stacks import file_of
from leto_elastic.recovery.policy import FailureClass
from leto_elastic.state.header import Signs

_INTERVAL = 0.025
"""Seconds between two samples."""

_EVERYBODY = 0
"""In place of the key of a trainer, when the job is to end."""

_standings = msgspec.json.Decoder(list[Standing])


class Watching:
    """See the module. `shell` carries out what follows, `decider` tells the other nodes."""

    def __init__(
        self, shell: Shell, decider: Decider, settings: Settings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._shell = shell
        self._decider = decider
        self._clock = clock
        self._run_dir = settings.run_dir
        self._policy = settings.policy.hang
        self._patience = settings.policy.deadlines.abort
        self._job: Job | None = None
        self._watch = Watch(self._policy)
        self._finding = Finding({}, 0.0, 0.0)
        self._said = False  # what this node's trainers stand at; in a job of one node: judged
        self._ending: set[int] = set()  # keys of trainers
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin, in the running loop."""
        self._look()

    def close(self) -> None:
        """Watch no more, and give up what is under way."""
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()

    def _look(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_INTERVAL, self._look)
        job = self._shell.job
        if job is not self._job:
            self._job, self._watch = job, Watch(self._policy)
        samples = _samples(job) if job.steady else None
        if samples is None:
            self._watch.rest()
            self._said = False
            return
        found = self._finding = self._watch.look(self._clock(), samples)
        for rank, seconds in found.silent.items():
            self._end(job, Verdict((rank,), f"no Python ran in it for {seconds:.1f} s"), silent=True)
        if bool(found.stalled) != self._said:
            self._said = not self._said
            self._tell(job)

    def _tell(self, job: Job) -> None:
        """This node's trainers have begun to stall, or go on."""
        stand = _stand(job, self._finding.silent) if self._said else []
        if job.several:
            self._decider.say(job.epoch, STALLED, msgspec.json.encode(stand) if stand else b"")
        elif stand:
            self._end(job, culprit(stand))

    def met(self, epoch: int, said: Mapping[int, bytes]) -> None:
        """What all nodes have said; nothing, those whose trainers go on."""
        job = self._shell.job
        if epoch == job.epoch and job.steady and self._said and all(said.values()):
            stand = [standing for position in sorted(said) for standing in _standings.decode(said[position])]
            self._end(job, culprit(stand))

    # ---- acting

    def _end(self, job: Job, verdict: Verdict, *, silent: bool = False) -> None:
        """End the ranks of the verdict that are here; when it names none, the job."""
        for slot in job.slots:
            member = slot.trainer
            if member is not None and slot.rank in verdict.ranks and member.key not in self._ending:
                self._ending.add(member.key)
                self._start(self._end_rank(job, slot, member, verdict.reason, silent=silent))
        if not verdict.ranks and _EVERYBODY not in self._ending:
            self._ending.add(_EVERYBODY)
            self._start(self._end_job(job, verdict.reason))

    async def _end_rank(self, job: Job, slot: Slot, member: Member, reason: str, *, silent: bool) -> None:
        header = slot.held.header
        assert header is not None
        before = _sign(header, silent=silent)
        found = self._finding
        why = reason if silent else f"{reason}; no progress for {found.stalled:.1f} s (limit {found.limit:.1f} s)"
        path = await self._save(slot, member, why)
        self._ending.discard(member.key)
        if job is not self._shell.job or job.over or slot.trainer is not member or slot.held.header is not header:
            return
        if _sign(header, silent=silent) != before:  # it goes on
            return
        self._ending.add(member.key)
        slot.verdict, slot.detail = FailureClass.HANG, f"hung: {why}"
        self._emit(slot, member, why, path)
        self._shell.do([act.Kill(member.key)])
        await asyncio.sleep(self._patience)
        if job is self._shell.job and not job.over and slot.trainer is member:  # its memory may be in use still
            why = f"rank {slot.rank} hangs, and process {member.pid} does not end, not even by SIGKILL"
            self._shell.do([act.End(f"{why} after {self._patience:g} s; its stacks are in {path}")])

    async def _end_job(self, job: Job, reason: str) -> None:
        found = self._finding
        why = f"{reason}; no progress for {found.stalled:.1f} s (limit {found.limit:.1f} s)"
        members = [(slot, slot.trainer) for slot in job.slots if slot.trainer is not None]
        paths = await asyncio.gather(*(self._save(slot, member, why) for slot, member in members))
        self._ending.discard(_EVERYBODY)
        if job is self._shell.job and job.steady and self._said:
            for (slot, member), path in zip(members, paths, strict=True):
                self._emit(slot, member, why, path)
            hint = "a longer limit is hang.min in the policy, or leto.pause_watch() around what takes so long"
            self._shell.do([act.End(f"the job hangs: {why}; {hint}")])

    async def _save(self, slot: Slot, member: Member, why: str) -> Path:
        path = file_of(self._run_dir, slot.rank, member.pid)
        header = slot.held.header
        await stacks.save(member.pid, header.thread if header is not None else 0, path, f"rank {slot.rank}: {why}")
        return path

    def _emit(self, slot: Slot, member: Member, why: str, path: Path) -> None:
        position = slot.position()
        step = position.step if position is not None else 0
        fields = {"rank": slot.rank, "pid": member.pid, "step": step, "reason": why, "stacks": str(path)}
        self._shell.emit("hang", {**fields, "limit": self._finding.limit})

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            error = task.exception()
            if error is not None:
                self._shell.broken(error)


def _sign(header: HeaderView, *, silent: bool) -> object:
    """What changes when a trainer that hung goes on."""
    return header.beat if silent else header.signs.progress


def _samples(job: Job) -> dict[int, Signs] | None:
    """By rank; None until all trainers of this node show signs of life."""
    found = {}
    for slot in job.slots:
        header = slot.held.header
        if slot.trainer is None or header is None or not header.valid:
            return None
        signs = found[slot.rank] = header.signs
        if signs.beat == 0.0:
            return None
    return found


def _stand(job: Job, silent: Mapping[int, float]) -> list[Standing]:
    found = []
    for slot in job.slots:
        header, member = slot.held.header, slot.trainer
        assert header is not None
        assert member is not None
        position, groups = header.position, header.groups
        found.append(
            Standing(
                rank=slot.rank,
                step=position.step,
                phase=int(position.phase),
                waiting=header.waiting,
                calls={key: calls for key, (calls, _) in groups.items()},
                last={key: last for key, (_, last) in groups.items()},
                parked=member.parked,
                silent=slot.rank in silent,
            )
        )
    return found
