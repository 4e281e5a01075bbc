"""What a node does together with the others: the work between the events of its state machine, as tasks of the loop.

Each of them looks whether its epoch is still the job's before it tells the state machine anything: the next plan may
have come meanwhile, and begins everything again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol

from leto_elastic.errors import LetoError, StateError
from leto_elastic.launch.actions import Action
from leto_elastic.launch.deciding import Decider
from leto_elastic.launch.job import Job
from leto_elastic.launch.protection import Damaged, Overtaken, Protection
from leto_elastic.launch.segments import Segments
from leto_elastic.launch.slots import Blob


class Fenced(Exception):
    """The job has gone on without this node; nothing of what runs here is of use any more."""


class Shell(Protocol):
    """Who carries out what follows."""

    @property
    def job(self) -> Job: ...

    def do(self, actions: Sequence[Action]) -> None: ...

    def emit(self, event: str, fields: dict[str, object]) -> None: ...

    def broken(self, error: BaseException) -> None: ...

    def placed(self) -> None:
        """This node's slots have ranks now."""
        ...


class Together:
    """See the module.

    Args:
        shell: told what to do.
        decider: told what this node says.
        protection: of the memory; None in a job of one node, where nothing here is used.
        held: the segments of each slot, by index.
    """

    def __init__(self, shell: Shell, decider: Decider, protection: Protection | None, held: Sequence[Segments]) -> None:
        self._shell = shell
        self._decider = decider
        self._protection = protection
        self._held = dict(enumerate(held))
        self._tasks: set[asyncio.Task[None]] = set()

    def stand(self, epoch: int) -> None:
        """Say where this node's slots stand, who do not move any more."""
        self._start(self._stand(epoch))

    def met(self, epoch: int, stage: str, said: Mapping[int, bytes]) -> None:
        """All nodes have come to a stage."""
        job = self._shell.job
        if epoch != job.epoch or job.over or job.spare:
            return
        if stage == "ready":
            if self._protection is not None:
                self._protection.resume()
            self._shell.do(job.all_ready(epoch, time.monotonic()))
        else:
            self._start(self._restore(epoch, said))

    def recall(self, slot: int) -> None:
        """Fetch what keepers have of a slot that this node has taken over."""
        self._start(self._recall(slot))

    def doubt(self, position: int) -> None:
        """The lease of a node has ended, as it does also when etcd was away: one whose keeper answers is there."""
        if not (self._shell.job.spare or self._shell.job.over):
            self._start(self._doubt(position))

    def look_around(self, patience: float) -> None:
        """When etcd has been silent for so long, this node's place is taken by now, unless etcd is away for all."""
        job = self._shell.job
        if job.several and not job.spare and self._decider.silence > patience:
            self._start(self._look_around())

    def close(self) -> None:
        """Give up what is under way."""
        for task in list(self._tasks):
            task.cancel()

    async def _stand(self, epoch: int) -> None:
        job = self._shell.job
        payload = b"" if self._protection is None else await self._protection.standing(job.slots)
        if epoch == job.epoch and not job.over:
            self._decider.say(epoch, "standing", payload)

    async def _restore(self, epoch: int, said: Mapping[int, bytes]) -> None:
        job = self._shell.job
        assert self._protection is not None
        try:
            version, manifests = await self._protection.restore(epoch, job.slots, self._held, said)
        except Damaged as error:
            if epoch == job.epoch and not job.over:
                self._shell.emit("damaged", {"what": f"memory of ranks {list(error.ranks)}", "reason": str(error)})
                self._shell.do(job.damaged(error.ranks))
        except Overtaken:
            return
        except StateError:
            if epoch == job.epoch:
                raise
        else:
            before = {index: job.slots[index].manifest for index in manifests}
            if not job.over:
                self._shell.do(job.restored(epoch, version, manifests, time.monotonic()))
            for index, blob in manifests.items():
                _close(before[index] if job.slots[index].manifest is blob else blob)

    async def _recall(self, slot: int) -> None:
        assert self._protection is not None
        job = self._shell.job
        rank = job.slots[slot].rank
        try:
            record = await self._protection.recall(rank)
        except LetoError as error:
            raise LetoError(f"rank {rank} cannot be replaced: {error}") from error
        if job.over:
            _close(record)
            return
        _close(job.slots[slot].record)
        self._shell.placed()
        self._shell.do(job.recalled(slot, record))

    async def _doubt(self, position: int) -> None:
        job = self._shell.job
        seats = job.world.seats
        alive = self._protection is not None and await self._protection.answers(position)
        if not alive and job is self._shell.job and seats[position] == job.world.seats[position]:
            self._shell.do(job.node_gone(position, time.monotonic()))

    async def _look_around(self) -> None:
        job, protection = self._shell.job, self._protection
        assert protection is not None
        others = [position for position in range(len(job.world.seats)) if position != job.world.position]
        answers = await asyncio.gather(*(protection.answers(position) for position in others))
        if not any(answers) and job is self._shell.job and not job.over:
            self._shell.broken(Fenced("neither etcd nor any other node answers"))

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


def _close(blob: Blob | None) -> None:
    if blob is not None:
        os.close(blob.fd)
