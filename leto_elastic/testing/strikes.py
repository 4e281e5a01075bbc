"""Carries out a list of faults on a job that runs: finds the targets, strikes from outside, undoes what ends again.

Guarantees: only processes of the job are hit, by descriptors that were taken before it was looked whose they are; a
fault that would lose a node waits until every rank is protected again, in a later generation than at the last loss;
whatever was stopped, paused or cut is on its way again when `Strikes.run` returns.
"""

from __future__ import annotations

import heapq
import itertools
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from leto_elastic.testing.census import Census, census
from leto_elastic.testing.chaos import Fault, Topology
from leto_elastic.testing.cluster import Cluster, Node
from leto_elastic.testing.job import Job
from leto_elastic.testing.processes import Launched, Resources, resources
from leto_elastic.testing.watching import Event

_TICK = 0.01
_LOOK = 0.3
"""Seconds between two looks at etcd's records."""

_PATIENCE = 30.0
"""Seconds that a fault waits for a target before it is left out."""

_RETURN = 8.0
"""Seconds after which a node that was cut off has ended itself, or waits as a spare."""

_SIGNALS = {
    "kill": signal.SIGKILL,
    "term": signal.SIGTERM,
    "segv": signal.SIGSEGV,
    "abrt": signal.SIGABRT,
    "several": signal.SIGKILL,
    "shadow": signal.SIGKILL,
    "both": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "zygote": signal.SIGKILL,
    "last": signal.SIGKILL,
    "agent_stop": signal.SIGSTOP,
    "agent_freeze": signal.SIGSTOP,
}


_OF_NODES = {
    "agent_kill": "SIGKILL of the agent of node",
    "node": "SIGKILL of all of node",
    "leader": "SIGKILL of all of the leader's node",
    "link": "link down of node",
    "cut": "link down of node",
}


class Etcd(Protocol):
    """The server that the job uses."""

    def pause(self) -> None:
        """SIGSTOP it."""
        ...

    def resume(self) -> None:
        """SIGCONT it."""
        ...

    def kill(self) -> None:
        """SIGKILL it."""
        ...

    def start(self) -> None:
        """Start it again, on its data."""
        ...


class Records(Protocol):
    """What the job says in etcd."""

    def leader(self) -> int:
        """Pid of the agent that leads. Raises KeyError when none does."""
        ...

    def protected(self, ranks: int) -> tuple[int, int]:
        """(generation, version) that all ranks are protected in; (-1, -1) for none."""
        ...


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that was carried out.

    Args:
        fault: as it was asked for.
        time: monotonic seconds.
        ranks: whose trainers were hit, by a signal or with their node.
        pids: that were hit, all of a node for one that was lost.
        loss: the memory of a node was lost.
        amid: some rank had no trainer, so a recovery was under way.
        what: for a human.
    """

    fault: Fault
    time: float
    ranks: tuple[int, ...]
    pids: frozenset[int]
    loss: bool
    amid: bool
    what: str


class Strikes:
    """See the module.

    Args:
        job: begun, with all its shadows ready.
        topology: of it.
        faults: by time, see `leto_elastic.testing.chaos.schedule`.
        etcd, records: of the job; None for an embedded one, whose process is then the target.
        tell: told each fault.
    """

    def __init__(
        self,
        job: Job | Cluster,
        topology: Topology,
        faults: Sequence[Fault],
        *,
        etcd: Etcd | None = None,
        records: Records | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.struck: list[Struck] = []
        self.left_out: list[Fault] = []
        self.problems: list[str] = []
        self._job, self._topology, self._etcd, self._records, self._tell = job, topology, etcd, records, tell
        self._faults = deque(faults)
        self._undo: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._shift = 0.0
        self._wait_until: float | None = None  # for a target of the fault that is due
        self._lose_at: float | None = None  # when the loss that is due may come
        self._looked = 0.0
        self._away = 0  # reasons for etcd to be away
        self._generation = -1  # at the last loss
        self._seen = -1
        self._thawed: float | None = None  # when the node of the last loss, which was only silent, was let go on
        self._losses = 0

    def run(self) -> list[Struck]:
        """Carry out all faults, and undo them. Raises JobError when the job or its deadline ends before that."""
        self._begin = time.monotonic()
        self._job.wait_for(self._tick, lambda: f"end of the faults ({len(self._faults)} to come)", every=_TICK)
        return self.struck

    def wait_quiet(self, seconds: float) -> bool:
        """Whether within that time every rank had a trainer and a shadow that was ready, and nothing was repaired."""
        end = time.monotonic() + seconds
        look = lambda: True if self._quiet() else False if time.monotonic() > end else None  # noqa: E731
        return self._job.wait_for(look, lambda: "quiet", every=0.05)

    def last(self, fault: Fault) -> None:
        """Strike once more, `fault.hold` seconds from now, while the job comes to its end; unless that is over then."""
        end = time.monotonic() + fault.hold
        while time.monotonic() < end and not all(node.ended(0) for node in self._nodes()):
            time.sleep(_TICK)
        struck = self._strike(fault)
        if struck is not None:
            self.struck.append(struck)
            self._tell(f"{struck.time - self._begin:8.3f}  {struck.what}")

    def resources(self) -> dict[int, Resources]:
        """What each live agent holds, by the index of its node."""
        return {index: resources(node.pid) for index, node in enumerate(self._nodes()) if not node.ended(0)}

    def descriptors(self) -> dict[int, list[str]]:
        """What the descriptors of each live agent refer to."""
        found: dict[int, list[str]] = {}
        for index, node in enumerate(self._nodes()):
            if not node.ended(0):
                links = Path(f"/proc/{node.pid}/fd").iterdir()
                found[index] = sorted(os.path.realpath(link) for link in links)
        return found

    # ---- time

    def _tick(self) -> bool | None:
        now = time.monotonic()
        if self._undo and self._undo[0][0] <= now:
            heapq.heappop(self._undo)[2]()
            return None
        if not self._faults:
            return None if self._undo else True
        fault = self._faults[0]
        due = self._begin + fault.at + self._shift
        if now < due:
            return None
        if self._topology.loses(fault.kind) and not self._may_lose(fault, now):
            return None
        struck = self._strike(fault)
        if struck is None:  # no target yet
            if self._wait_until is None:
                self._wait_until = now + _PATIENCE
            if now < self._wait_until:
                return None
            self.left_out.append(fault)
            self._tell(f"{now - self._begin:8.3f}  {fault.kind}: left out, there was no target")
        else:
            self.struck.append(struck)
            self._tell(f"{struck.time - self._begin:8.3f}  {struck.what}{', amid a recovery' if struck.amid else ''}")
        self._shift += max(0.0, now - due)  # those to come keep their distance
        self._wait_until = self._lose_at = None
        self._faults.popleft()
        return None

    def _later(self, seconds: float, undo: Callable[[], None]) -> None:
        heapq.heappush(self._undo, (time.monotonic() + seconds, next(self._numbers), undo))

    def _may_lose(self, fault: Fault, now: float) -> bool:
        """Whether another loss is survivable now; then it comes at a random moment within the next second."""
        if self._lose_at is not None:
            return now >= self._lose_at and not self._away
        if self._away or now < self._looked + _LOOK or self._records is None:
            return False
        self._looked = now
        generation, _ = self._records.protected(self._topology.ranks)
        quiet = self._thawed is not None and now > self._thawed + 2 * self._topology.lease
        never_lost = quiet and self._lost_nodes() == self._losses
        if generation < 0 or (generation <= self._generation and not never_lost):
            return False
        self._seen = generation
        self._lose_at = now + fault.pick / 1000
        return False

    def _lost_nodes(self) -> int:
        return sum(event["event"] == "failure" and event["cause"] == "node" for event in self._job.events())

    # ---- what there is

    def _nodes(self) -> Sequence[Launched]:
        return self._job.nodes if isinstance(self._job, Cluster) else [self._job]

    def census(self) -> Census:
        homes = {
            pid: (index, command)
            for index, node in enumerate(self._nodes())
            if not node.ended(0)
            for pid, command in node.processes()
        }
        agents = {index: node.pid for index, node in enumerate(self._nodes()) if not node.ended(0)}
        return census(self._job.events(), homes, agents, self._topology.ranks)

    def _quiet(self) -> bool:
        there = self.census()
        ready = _ready(self._job.events())
        shadows = {rank for rank, pid in there.shadows if pid in ready}
        return len(there.trainers) == self._topology.ranks and shadows >= set(there.trainers)

    # ---- striking

    def _strike(self, fault: Fault) -> Struck | None:
        """None: there is no target now."""
        there = self.census()
        match fault.kind:
            case "etcd_pause" | "etcd_kill":
                return self._strike_etcd(fault, there)
            case "agent_kill" | "node" | "leader" | "link" | "cut":
                return self._strike_node(fault, there)
            case _:
                return self._strike_processes(fault, there)

    def _done(self, fault: Fault, there: Census, at: float, pids: Sequence[int], what: str) -> Struck:
        ranks = tuple(sorted(rank for rank, pid in there.trainers.items() if pid in pids))
        loss = self._topology.loses(fault.kind)
        if loss:
            self._generation, self._thawed, self._losses = self._seen, None, self._lost_nodes()
        amid = len(there.trainers) < self._topology.ranks
        return Struck(fault, at, ranks, frozenset(pids), loss, amid, what)

    def _strike_processes(self, fault: Fault, there: Census) -> Struck | None:
        found = there.targets(fault)
        if not found:
            return None
        number = _SIGNALS[fault.kind]
        at = time.monotonic()
        hit = [pid for node in self._nodes() if not node.ended(0) for pid in node.signal_all(found, number)]
        if not hit:
            return None
        if number is signal.SIGSTOP:
            self._later(fault.hold, lambda: self._go_on(hit, frozen=self._topology.loses(fault.kind)))
        lasting = f" for {fault.hold:g} s" if number is signal.SIGSTOP else ""
        what = f"{fault.kind}: {number.name} to {there.names(hit)}{lasting}"
        whole = [pid for pid in there.homes if fault.kind == "agent_freeze" and there.homes[pid] == there.homes[hit[0]]]
        return self._done(fault, there, at, whole or hit, what)

    def _go_on(self, pids: Sequence[int], *, frozen: bool) -> None:
        for node in self._nodes():
            if not node.ended(0):
                node.signal_all(pids, signal.SIGCONT)
        if frozen:
            self._thawed = time.monotonic()

    def _strike_node(self, fault: Fault, there: Census) -> Struck | None:
        assert isinstance(self._job, Cluster)
        members = there.members()
        if fault.kind == "leader":
            assert self._records is not None
            try:
                leader = self._records.leader()
            except KeyError:
                return None
            members = [index for index, pid in there.agents.items() if pid == leader]
        if not members:
            return None
        index = members[fault.pick % len(members)]
        node = self._job.nodes[index]
        pids = [pid for pid, home in there.homes.items() if home == index]
        at = time.monotonic()
        match fault.kind:
            case "agent_kill":
                node.hurt = True
                node.kill_agent()
            case "link" | "cut":
                hurt = node.hurt
                self._job.link_down(index)
                node.hurt = hurt or fault.kind == "cut"
            case _:
                node.kill_all()
        self._later(fault.hold, lambda: self._bring_back(index, node, fault))
        what = f"{fault.kind}: {_OF_NODES[fault.kind]} {index} with {there.names(pids)}, back after {fault.hold:g} s"
        return self._done(fault, there, at, pids, what)

    def _bring_back(self, index: int, node: Node, fault: Fault) -> None:
        assert isinstance(self._job, Cluster)
        if fault.kind in ("link", "cut"):
            self._job.link_up(index)
            if fault.kind == "cut":
                self._thawed = time.monotonic()
                self._later(_RETURN, lambda: self._replace(node))
            return
        self._replace(node)

    def _replace(self, node: Node) -> None:
        """Start another one in the place of a node that has ended."""
        assert isinstance(self._job, Cluster)
        if not node.ended(0):
            return
        if left := node.leftovers(5.0):
            self.problems.append(f"of node {node.number}, whose agent was killed, are left after 5 s: {left}")
        self._job.start_node(node.number)

    def _strike_etcd(self, fault: Fault, there: Census) -> Struck | None:
        kill = fault.kind == "etcd_kill"
        what = f"{fault.kind}: {'SIGKILL' if kill else 'SIGSTOP'} of etcd for {fault.hold:g} s"
        at = time.monotonic()
        if self._etcd is None:
            if not (own := there.embedded()):
                return None
            node = self._nodes()[0]
            if not node.signal_all(own, signal.SIGKILL if kill else signal.SIGSTOP):
                return None
            if not kill:
                self._later(fault.hold, lambda: self._go_on(own, frozen=False))
            return self._done(fault, there, at, [], what)
        (self._etcd.kill if kill else self._etcd.pause)()
        self._away += 1
        self._later(fault.hold, lambda: self._etcd_back(kill=kill))
        return self._done(fault, there, at, [], what)

    def _etcd_back(self, *, kill: bool) -> None:
        assert self._etcd is not None
        (self._etcd.start if kill else self._etcd.resume)()
        self._away -= 1


def _ready(events: Sequence[Event]) -> set[object]:
    return {event["pid"] for event in events if event["event"] == "shadow_ready"}
