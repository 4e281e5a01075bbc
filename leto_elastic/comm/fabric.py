"""Everything a process has to do with communicators: one object, living as long as the process.

It registers the backend "leto" and knows all groups made on it. `connect` gives all of them new inner groups under one
epoch's store; `abort`, from the thread that listens to the agent, ends the inner groups of an epoch and wakes whoever
is blocked in them, in milliseconds, dead and stopped peers included. Between the two the epoch is *poisoned*: see
`work` for what a collective does then.

Groups must be made in the same order in all ranks (torch asks for that too): they are connected one after the other in
that order. A group made within a step that fails is not kept.

`exchange` and `vote` are one tiny all-reduce each, in which every rank fills its own row. With 4 ranks on 2 cores it
took 1.2 ms, gloo's all-to-all 2.2, its barrier 2.6, its all-gather 4.5.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, Work

from leto_elastic.comm import quiet
from leto_elastic.comm.group import LetoGroup
from leto_elastic.comm.inner import GlooEpoch
from leto_elastic.comm.quiet import Parked
from leto_elastic.comm.record import Recorder, Replay
from leto_elastic.comm.store import StoreClients
from leto_elastic.comm.work import LetoWork
from leto_elastic.errors import CommunicatorLost, EpochAborted, LetoError, ShadowUnfit

BACKEND = "leto"
_OWN = "leto:own"  # the runtime's own collectives, on the default group's connections
_POLL = 0.002  # seconds between two attempts to wake a construction that opens new sockets meanwhile

_current: Fabric | None = None


class Watch(Protocol):
    """Who is told of collectives, to know later which rank did not come to one. Groups are told by their names."""

    def knows(self, group: str) -> None:
        """There is such a group."""

    def entered(self, group: str, signature: int) -> None:
        """A collective of this group begins, and not one between two ranks; `signature` is the same in all ranks."""

    def restart(self) -> None:
        """A new epoch: counts begin at 0 in every rank."""


def _create(options: Any, _backend_options: Any) -> LetoGroup:
    """torch's way to make a group, `extended_api`."""
    if _current is None:
        raise LetoError("the backend 'leto' is used before leto_elastic.init()")
    size = int(options.group_size)
    return _current.create(
        str(options.group_id),
        int(options.group_rank),
        size,
        options.timeout,
        list(options.global_ranks_in_group) or list(range(size)),
    )


class Fabric:
    """All communicators of one process.

    `timeout`: seconds that one collective may take at most. `rebuild`: seconds that a group made in a live epoch may
    take to connect. `loopback`: start without peers (a shadow), with the recorded set-up `replay`, until the first
    `connect`. `on_failure` is called once per epoch, from whichever thread sees it, when a collective fails although no
    abort was announced. `tolerant`: within a step or section (see `work`). `address`: of this node, see `GlooEpoch`.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        timeout: float,
        loopback: bool = False,
        replay: bytes | None = None,
        rebuild: float = 30.0,
        nccl: bool = False,
        address: str = "",
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.loopback = loopback
        self.tolerant = False
        self.poisoned = False
        self.spoiled = False  # poisoned, and a collective of this process was lost by it: what it computes is garbage
        self.reason = ""
        self.epoch = -1
        self.unfit: str | None = None  # why the replay failed, for whoever lost the exception on its way
        self.on_failure: Callable[[str], None] | None = None
        self._timeout = timedelta(seconds=timeout)
        self._rebuild = rebuild
        self.nccl = nccl
        self._address = address
        self._groups: list[LetoGroup] = []
        self._recorder: Recorder | None = None
        self._replay = Replay(replay) if replay is not None else None
        self._clients = StoreClients()
        self._works: weakref.WeakSet[LetoWork] = weakref.WeakSet()  # under way, or over and still referred to
        self._stuck: list[LetoWork] = []  # abandoned operations of the inner groups at hand
        self._parked = Parked()
        self._settling = threading.Lock()
        self._lock = threading.RLock()
        self._generation: GlooEpoch | None = None  # the epoch that is connected or being connected
        self._building = False
        self._aborted = -1  # newest epoch that was aborted, and why
        self._abort_reason = ""
        self._expired = False  # the deadline of a construction passed
        self._announced = -1  # newest epoch reported by on_failure
        self._watch: Watch | None = None

    # ---- groups

    def register(self) -> None:
        """Make `backend="leto"` known to torch.distributed, served by this object."""
        global _current
        _current = self
        if not hasattr(dist.Backend, BACKEND.upper()):
            dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])

    @property
    def store(self) -> Store:
        """A store for `init_process_group`: the epoch's, or one of this process alone in loopback mode."""
        if self.loopback or self._generation is None or self._generation.store is None:
            return HashStore()
        return self._generation.store

    def create(self, name: str, rank: int, size: int, timeout: timedelta, ranks: list[int]) -> LetoGroup:
        """A new group; in a live epoch it is connected at once."""
        group = LetoGroup(self, name, rank, size, min(timeout, self._timeout), ranks)
        if not self.loopback:
            generation = self._generation
            if generation is None or self.poisoned:
                raise CommunicatorLost(f"group {name!r} cannot be made: {self.reason or 'no epoch is connected'}")
            try:
                self._construct(generation, time.monotonic() + self._rebuild, [group])
            except (EpochAborted, CommunicatorLost) as error:
                self.failed(generation.number, str(error))
                raise CommunicatorLost(f"group {name!r} could not be made: {error}") from error
        with self._lock:
            self._groups.append(group)
        if self._watch is not None:
            self._watch.knows(name)
        return group

    def forget(self, group: LetoGroup) -> None:
        """The group was destroyed by the user."""
        with self._lock:
            if group in self._groups:
                self._groups.remove(group)
        self._let_go(group)

    def track(self, work: LetoWork, group: str, signature: int = 0) -> LetoWork:
        """Remember an operation of a group under way, so that an abort can end it. `signature`: of a collective."""
        work.group = group
        if signature and self._watch is not None:
            self._watch.entered(group, signature)
        with self._lock:
            self._works.add(work)
        return work

    def count_in(self, watch: Watch | None) -> None:
        """Tell `watch` (None: nobody) of the groups, and of all collectives from now on."""
        if watch is not None:
            with self._lock:
                names = [_OWN, *(group.getGroupName() for group in self._groups)]
            for name in names:
                watch.knows(name)
        self._watch = watch

    def pending(self) -> str:
        """Name of the group with the first operation of this epoch that is not over, "" when all are. Any thread."""
        with self._lock:
            works = list(self._works)
        waiting = [work for work in works if work.epoch == self.epoch and not work.is_completed()]
        return min(waiting, key=lambda work: work.number).group if waiting else ""

    # ---- epochs

    def prepare(self, store_host: str, store_port: int) -> None:
        """Open the client of a store that a later `connect` may name (in a shadow, before it parks)."""
        self._clients.prepare(store_host, store_port, self._rebuild)

    def connect(self, epoch: int, store_host: str, store_port: int, deadline: float) -> None:
        """Give every group an inner group of `epoch`; ends loopback mode and poison.

        `deadline`: seconds that it may take. Raises EpochAborted when this or a later epoch is aborted meanwhile,
        CommunicatorLost when the deadline passes (naming the ranks that did not come). A connection that is lost on the
        way, the store's too, is a failure of somebody else: the abort that follows is waited for. Main thread only.
        """
        former = self._generation
        self._release()
        generation = GlooEpoch(epoch, self.rank, self.world_size, self.nccl, self._address)
        end = time.monotonic() + deadline
        try:
            with self._lock:
                self._refuse_aborted(epoch)
                self._generation = generation
            self._construct(generation, end, list(self._groups), (store_host, store_port))
        except CommunicatorLost:
            self._await_abort(epoch, end)
            raise
        finally:  # whoever has come here has severed the former one, too
            if former is not None:
                former.let_go()
        with self._lock:
            self._refuse_aborted(epoch)
            self.epoch = epoch
            self.loopback = False
            self.poisoned, self.spoiled, self.reason = False, False, ""
        if self._watch is not None:
            self._watch.restart()

    def _construct(
        self, generation: GlooEpoch, deadline: float, groups: list[LetoGroup], store: tuple[str, int] | None = None
    ) -> None:
        """Build inner groups; `abort` and the deadline can interrupt it."""
        with self._lock:
            self._refuse_aborted(generation.number)
            self._building, self._expired = True, False
        timer = threading.Timer(max(deadline - time.monotonic(), 0.0), self._expire, [generation])
        timer.daemon = True
        timer.start()
        built: list[dist.ProcessGroup] = []
        try:
            if store is not None:
                client = self._clients.get(
                    *store, deadline - time.monotonic(), lambda: self._expired or self._aborted >= generation.number
                )
                generation.open(client, deadline)
            for group in groups:
                built.append(generation.build(group.getGroupName(), group.rank(), group.size(), group.timeout))
                if self._expired or self._aborted >= generation.number:
                    break
        except CommunicatorLost:
            self._refuse_aborted(generation.number)
            raise
        except RuntimeError as error:
            self._refuse_aborted(generation.number)
            where = f"group {groups[len(built)].getGroupName()!r}" if len(built) < len(groups) else "the store"
            raise CommunicatorLost(f"epoch {generation.number}: {where} could not be connected: {error}") from error
        finally:
            with self._lock:
                self._building = False
            timer.cancel()
            timer.join()
        self._refuse_aborted(generation.number)
        if self._expired:
            raise CommunicatorLost(f"epoch {generation.number}: groups were not connected before the deadline")
        for group, inner in zip(groups, built, strict=True):
            group.inner = inner

    def _expire(self, generation: GlooEpoch) -> None:
        self._expired = True
        self._interrupt(generation)

    def _interrupt(self, generation: GlooEpoch) -> None:
        """Wake the construction until it has ended: it may open further sockets after each look at them."""
        while True:
            with self._lock:
                if not self._building:
                    return
            generation.interrupt()
            time.sleep(_POLL)

    def _await_abort(self, epoch: int, end: float) -> None:
        """Whoever was at the other end of a lost connection is gone: the agent will tell, if it takes until `end`."""
        while time.monotonic() < end:
            self._refuse_aborted(epoch)
            time.sleep(_POLL)

    def _refuse_aborted(self, epoch: int) -> None:
        if self._aborted >= epoch:
            raise EpochAborted(f"epoch {epoch} was aborted: {self._abort_reason}")

    def _release(self) -> None:
        """Let go of the inner groups. Their operations end first: one that is pending would block their end."""
        generation = self._generation
        if generation is not None:
            generation.sever()
            self._settle(generation)
        self._parked.release()
        for group in self._groups:
            self._let_go(group)
        with self._lock:
            self._generation = None
            self._stuck.clear()

    def _settle(self, generation: GlooEpoch) -> None:
        with self._settling:
            with self._lock:
                works = [work for work in self._works if work.epoch == generation.number]
            self._stuck += quiet.settle(works, generation.sever)

    def _let_go(self, group: LetoGroup) -> None:
        inner, group.inner = group.inner, None
        works = [work for work in self._stuck if work.owner == id(inner)]
        if inner is not None and works:
            self._parked.add(inner, works)

    def abort(self, epoch: int, reason: str) -> None:
        """End `epoch`: poison it and wake whoever is blocked in it, or in connecting it. Any thread; idempotent."""
        with self._lock:
            if epoch > self._aborted:
                self._aborted, self._abort_reason = epoch, reason
            generation = self._generation
            if not self.loopback and epoch >= self.epoch:
                self.poison(reason)
            if generation is None or generation.number > epoch:
                return
        generation.sever()
        self._interrupt(generation)
        self._settle(generation)

    def poison(self, reason: str) -> None:
        """From now on collectives of this epoch are lost."""
        with self._lock:
            if not self.poisoned:
                self.poisoned, self.reason = True, reason

    # ---- Judge of LetoWork

    def failed(self, epoch: int, reason: str) -> None:
        """A collective of `epoch` failed by itself or by an abort."""
        with self._lock:
            if epoch != self.epoch:
                return
            self.spoiled = True
            announce = self._aborted < epoch and self._announced < epoch
            self._announced = max(self._announced, epoch) if announce else self._announced
            self.poison(reason)
        if announce and self.on_failure is not None:
            self.on_failure(reason)

    def forgives(self, epoch: int) -> bool:
        """Whether a lost collective of `epoch` has to look finished."""
        self.spoiled = self.spoiled or epoch == self.epoch
        return epoch == self.epoch and self.tolerant

    def error(self, epoch: int) -> CommunicatorLost:
        """What a lost collective of `epoch` raises otherwise."""
        self.spoiled = True
        reason = self.reason if epoch == self.epoch else "the job has gone on to another epoch"
        return CommunicatorLost(f"the communicator of epoch {epoch} was lost: {reason}")

    # ---- set-up record

    def start_recording(self) -> None:
        """Keep the outputs of all collectives from now on, for this slot's shadow."""
        self._recorder = Recorder()

    def stop_recording(self) -> bytes:
        """The record so far."""
        recorder, self._recorder = self._recorder, None
        return (recorder or Recorder()).encode()

    def recorded(self, group: str, op: str, outputs: list[torch.Tensor]) -> Callable[[Work], None] | None:
        """Note a call while recording; the result is to be called with its finished work."""
        recorder = self._recorder
        if recorder is None:
            return None
        number = recorder.began(group, op, outputs)

        def done(work: Work) -> None:
            recorder.done(group, number, outputs, work._source_rank() if op == "recv_anysource" else -1)

        return done

    def replayed(self, group: str, number: int, op: str, outputs: list[torch.Tensor]) -> int:
        """Copy recorded outputs of a loopback call in. Raises ShadowUnfit; returns the source of a receive or -1."""
        if self._replay is None:
            return -1
        try:
            source = self._replay.take(group, number, op, outputs)
        except ShadowUnfit as error:
            self.unfit = self.unfit or str(error)
            raise
        return -1 if source is None else source

    def finish_replay(self) -> None:
        """The set-up is over. Raises ShadowUnfit when the trainer's had collectives that this one's had not."""
        if self._replay is not None:
            replay, self._replay = self._replay, None
            replay.check_complete({group.getGroupName(): group.calls for group in self._groups})

    # ---- the runtime's own collectives

    def exchange(self, payload: list[int]) -> list[list[int]]:
        """All-gather of a list of integers of 64 bits, of the same length in every rank; the result is by rank.

        Raises EpochAborted when the epoch is lost.
        """
        if self.loopback:
            return [list(payload) for _ in range(self.world_size)]
        everyones = torch.zeros(self.world_size, len(payload), dtype=torch.int64)
        everyones[self.rank] = torch.tensor(payload, dtype=torch.int64)
        if not self._all_reduce(everyones, dist.ReduceOp.SUM):
            raise EpochAborted(f"epoch {self.epoch} was lost: {self.reason}")
        rows: list[list[int]] = everyones.tolist()
        return rows

    def vote(self, value: int = 0) -> int | None:
        """The lowest `value` (64 bits) of all ranks, when each has come to this vote with a whole epoch; else None."""
        if self.loopback:
            return value
        lowest = torch.tensor([value], dtype=torch.int64)
        return int(lowest) if self._all_reduce(lowest, dist.ReduceOp.MIN) else None

    def _all_reduce(self, values: torch.Tensor, op: Any) -> bool:
        epoch, inner = self.epoch, self._groups[0].inner if self._groups else None
        if self.poisoned or inner is None:
            return False
        options = dist.AllreduceOptions()
        options.reduceOp = op
        work = LetoWork(self, epoch, inner.allreduce([values], options), [values], owner=id(inner))
        return self.track(work, _OWN, 1).join()
