"""A process's membership in a leto job: its link, its communicators, its role."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from types import TracebackType

import torch.distributed as dist

from leto_elastic import wire
from leto_elastic.comm.fabric import Fabric
from leto_elastic.errors import EpochAborted, LetoError
from leto_elastic.observe import stacks
from leto_elastic.protect.checksum import checksum_at
from leto_elastic.recovery.policy import Policy
from leto_elastic.state import pack
from leto_elastic.state.header import Header
from leto_elastic.state.sums import Checksum
from leto_elastic.testing import faults as fault_plans
from leto_elastic.worker.heartbeat import Heartbeat
from leto_elastic.worker.link import Link
from leto_elastic.worker.replay import receive_own_broadcasts

log = logging.getLogger(__name__)


class Session:
    """One per process, made by `leto.init()`."""

    def __init__(self, path: str, token: str) -> None:
        start = float(os.environ.get("LETO_START_DEADLINE", "60"))
        self.link = Link(path, token, None if math.isinf(start) else start)
        self.welcome = self.link.welcome
        complete_environment(os.environ, self.welcome)
        self.generation = self.welcome.generation
        self.skip = -1  # the step to step over, by the plan of this epoch
        self.rank = self.welcome.rank
        self.policy = Policy.decode(self.welcome.policy)
        self.shadow = self.welcome.role == "shadow"
        self.faults = fault_plans.Faults.from_env(self.welcome.run_dir, self.rank)
        self.marks: dict[str, float] = {}
        self.record: dict[str, object] = {}
        self.running = False
        self.heartbeat: Heartbeat | None = None
        self._end_replay: Callable[[], None] = lambda: None
        self._on_active: list[Callable[[], object]] = []
        if self.shadow:
            self.record = pack.unpack(os.pread(fd := self.link.welcome_fds[0], os.fstat(fd).st_size, 0))
            os.close(fd)
        else:
            fault_plans.install(self.faults)
        self.fabric = Fabric(
            self.rank,
            self.welcome.world_size,
            timeout=self.policy.deadlines.collective,
            loopback=self.shadow,
            replay=self.record.get("setup") if self.shadow else None,  # type: ignore[arg-type]
            rebuild=self.policy.deadlines.rebuild,
            address=self.welcome.address,
        )
        self.link.on_abort = self._abort
        self.fabric.on_failure = self._suspect

    def join(self) -> None:
        """Make the default process group."""
        welcome = self.welcome
        self.fabric.register()
        self.link.start()
        if self.shadow:
            sys.excepthook = self._report_crash
            self._end_replay = receive_own_broadcasts()
        else:
            self._connect(welcome.epoch, welcome.store)
            self.fabric.start_recording()
        dist.init_process_group("leto", store=self.fabric.store, rank=welcome.rank, world_size=welcome.world_size)

    def _connect(self, epoch: int, store: wire.StoreAddress) -> None:
        self.fabric.connect(epoch, store.host, store.port, self.policy.deadlines.rebuild)

    def _report_crash(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None, /) -> None:
        """`sys.excepthook` of a shadow: whatever ends its script is the reason why it cannot stand in."""
        sys.__excepthook__(kind, error, trace)
        if self.shadow:
            self.link.send(
                wire.Unfit(reason=(self.fabric.unfit or f"its script raised {kind.__name__}: {error}")[:2000])
            )

    # ---- from other threads

    def _abort(self, epoch: int) -> None:
        self.fabric.abort(epoch, f"a worker of epoch {epoch} failed")

    def _suspect(self, reason: str) -> None:
        self.link.send(wire.Suspect(epoch=self.fabric.epoch, reason=reason[:2000]))

    # ---- the main thread

    def finish_set_up(self) -> None:
        """A shadow has come to its first step. Raises ShadowUnfit when its trainer's set-up had more collectives."""
        self._end_replay()
        self.fabric.finish_replay()

    def watched(self, header: Header) -> None:
        """This process trains from now on, with this header: its agent may watch it."""

        def last_words() -> None:
            header.last_words = time.monotonic()

        self.faults.on_fire = last_words
        file = stacks.file_of(self.welcome.run_dir, self.rank, os.getpid())
        self.heartbeat = Heartbeat(header, self.fabric, self.policy.hang, file)

    def mark(self, name: str) -> None:
        """Note when this process reached a point of the recovery (the last time counts)."""
        self.marks[name] = time.monotonic()

    def on_active(self, function: Callable[[], object]) -> None:
        """See `leto_elastic.on_active`."""
        if self.shadow:
            self._on_active.append(function)
        else:
            function()

    def activate(self) -> None:
        """A shadow has become a trainer: run what waited for that."""
        waiting, self._on_active = self._on_active, []
        for function in waiting:
            function()

    def rejoin(
        self, plan: wire.Plan | wire.Promote | None, words: Callable[[], Sequence[int]], step: int
    ) -> list[list[int]] | None:
        """Join the next epoch that gets together; returns the words of all ranks.

        None: no further epoch is needed, since every rank has committed the last step.

        While this process waits for a plan its agent may put its state back to an earlier version, header included.

        Args:
            plan: the plan at hand, None to wait for one.
            words: what this rank tells the others, as of then; equally many in every rank.
            step: for fault plans.
        """
        left = self.fabric.epoch
        while True:
            if plan is None or plan.epoch <= self.fabric.epoch:
                self.link.send(wire.Parked(epoch=left))
                patience = self.policy.deadlines.until_plan(several=bool(self.welcome.address))
                why = f"a plan after a failure ({self.fabric.reason or 'this process was just promoted'})"
                message = self.link.wait((wire.Plan, wire.Release), patience, why).message
                if isinstance(message, wire.Release):
                    return None
                assert isinstance(message, wire.Plan)
                plan = message
                if plan.epoch <= self.fabric.epoch:
                    continue
            if plan.store.port == 0:
                return None
            self.mark("plan")
            self.generation, self.skip = plan.generation, plan.skip
            try:
                self.faults.at("rebuild", step)
                self._connect(plan.epoch, plan.store)
                rows = self.fabric.exchange(list(words()))
            except EpochAborted:
                log.info("epoch %d was given up while it was joined", plan.epoch)
                left, plan = plan.epoch, None
                continue
            self.mark("rebuild")
            return rows

    def take_stdio(self, fds: list[int]) -> None:
        """Write to the trainer's stdout and stderr from now on."""
        for fd, target in zip(fds, (1, 2), strict=False):
            os.dup2(fd, target)
            os.close(fd)


def complete_environment(environment: MutableMapping[str, str], welcome: wire.Welcome) -> None:
    """Set what torchrun sets and this process lacks: a spare does not know its rank when it starts.

    The number of its node is right when all nodes have equally many ranks.
    """
    values = {
        "RANK": welcome.rank,
        "WORLD_SIZE": welcome.world_size,
        "LOCAL_RANK": welcome.local_rank,
        "LOCAL_WORLD_SIZE": welcome.local_world_size,
        "GROUP_RANK": (welcome.rank - welcome.local_rank) // welcome.local_world_size,
        "GROUP_WORLD_SIZE": -(-welcome.world_size // welcome.local_world_size),
        "ROLE_RANK": welcome.rank,
        "ROLE_WORLD_SIZE": welcome.world_size,
    }
    for name, value in values.items():
        environment.setdefault(name, str(value))


def checksum_by(policy: Policy) -> Checksum | None:
    """How a trainer makes the checksums of its segments, None when it keeps none."""
    return checksum_at if policy.state.retain == "file" else None


_current: Session | None = None


@contextlib.contextmanager
def pause_watch() -> Iterator[None]:
    """See `leto_elastic.pause_watch`."""
    heartbeat = _current.heartbeat if _current is not None else None
    with heartbeat.pause() if heartbeat is not None else contextlib.nullcontext():
        yield


def current() -> Session:
    """The session of this process. Raises LetoError before `leto.init()`."""
    if _current is None:
        raise LetoError("call leto_elastic.init() first")
    return _current


def start() -> Session:
    """Make the session of this process; see `leto_elastic.init`."""
    global _current
    if _current is not None:
        raise LetoError("leto_elastic.init() was called twice")
    path, token = os.environ.get("LETO_SOCKET"), os.environ.get("LETO_TOKEN")
    if not path or not token:
        raise LetoError(
            "leto_elastic.init(): this process was not started by a leto agent. Start the script with "
            "`torchrun --rdzv-backend=leto --nproc-per-node=N script.py` or `leto run ...`, and leave out "
            "--standalone, which silently replaces --rdzv-backend by c10d"
        )
    session = Session(path, token)
    _current = session
    session.join()
    return session
