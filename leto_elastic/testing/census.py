"""Who is who among the processes of a job: made of its events and of what is alive."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from leto_elastic.testing.chaos import Fault
from leto_elastic.testing.watching import Event

_ZYGOTE = "leto_elastic.launch.zygote"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Census:
    """The live processes of a job.

    Args:
        trainers: pid by rank, of those whose start or promotion an event tells; others are on their way.
        shadows: (rank, pid); rank -1 on a spare. One that is being promoted is still among them.
        homes: index of the node by pid.
        commands: command line by pid.
        agents: pid by index of the node.
    """

    trainers: Mapping[int, int]
    shadows: Sequence[tuple[int, int]]
    homes: Mapping[int, int]
    commands: Mapping[int, str]
    agents: Mapping[int, int]

    def targets(self, fault: Fault) -> list[int]:
        """The processes that a fault of the kind that hits processes hits; none when there are none now."""
        trainers = [self.trainers[rank] for rank in sorted(self.trainers)]
        match fault.kind:
            case "kill" | "term" | "segv" | "abrt" | "stop" | "last":
                return _one(trainers, fault.pick)
            case "several":
                enough = trainers if len(trainers) >= 2 else []
                return random.Random(fault.pick).sample(enough, min(fault.count, len(enough)))
            case "shadow":
                return _one([pid for _, pid in self.shadows], fault.pick)
            case "both":
                pairs = [(self.trainers[rank], pid) for rank, pid in self.shadows if rank in self.trainers]
                return [pid for pair in _one(pairs, fault.pick) for pid in pair]
            case "zygote":
                return _one(self._zygotes(), fault.pick)
            case "agent_stop" | "agent_freeze":
                return _one([self.agents[index] for index in self.members()], fault.pick)
            case _:
                raise ValueError(f"{fault.kind} does not hit single processes")

    def members(self) -> list[int]:
        """The nodes that have trainers, by index."""
        return sorted({self.homes[pid] for pid in self.trainers.values()} & self.agents.keys())

    def embedded(self) -> list[int]:
        """The etcd that an agent has started."""
        return [pid for pid, command in self.commands.items() if command.split(" ")[0].endswith("/etcd")]

    def names(self, pids: Sequence[int]) -> str:
        """For a human."""
        ranks = {pid: f"rank {rank}" for rank, pid in self.trainers.items()}
        shadows = {pid: f"the shadow of rank {rank}" if rank >= 0 else "a spare's shadow" for rank, pid in self.shadows}
        agents = {pid: f"the agent of node {index}" for index, pid in self.agents.items()}
        known = {**shadows, **agents, **ranks}
        told = sorted(f"{known[pid]} (pid {pid})" for pid in pids if pid in known)
        others = [f"pid {pid}" for pid in pids if pid not in known] if not told else []
        return ", ".join(told + others) or "nothing"

    def _zygotes(self) -> list[int]:
        """The oldest of each node: a worker that was just forked still has its command line."""
        found: dict[int, int] = {}
        for pid in sorted(self.homes):
            if _ZYGOTE in self.commands[pid]:
                found.setdefault(self.homes[pid], pid)
        return [found[index] for index in sorted(found)]


def census(
    events: Sequence[Event], processes: Mapping[int, tuple[int, str]], agents: Mapping[int, int], ranks: int
) -> Census:
    """What the events say about live processes.

    Args:
        events: of all nodes, by time.
        processes: (index of its node, command line) by pid.
        agents: pid by index of the node.
        ranks: world size.
    """
    role: dict[int, tuple[str, int]] = {}
    for event in events:
        match event:
            case {"event": "worker_started", "pid": int(pid), "role": str(kind), "rank": int(rank)}:
                role[pid] = (kind, rank)
            case {"event": "shadow_ready", "pid": int(pid), "rank": int(rank)} if pid in role:
                role[pid] = (role[pid][0], rank)  # it was a spare's before, without a rank
            case {"event": "recovery", "pids": dict(pids)}:
                role |= {pid: ("trainer", int(rank)) for rank, pid in pids.items() if isinstance(pid, int)}
            case {"event": "replaced", "pid": int(pid), "rank": int(rank)}:
                role[pid] = ("trainer", rank)
    live = {pid: role[pid] for pid in processes if pid in role}
    trainers = {rank: pid for pid, (kind, rank) in live.items() if kind == "trainer" and 0 <= rank < ranks}
    shadows = sorted((rank, pid) for pid, (kind, rank) in live.items() if kind == "shadow")
    homes = {pid: index for pid, (index, _) in processes.items()}
    return Census(trainers, shadows, homes, {pid: command for pid, (_, command) in processes.items()}, agents)


def _one(found: Sequence[T], pick: int) -> list[T]:
    return [found[pick % len(found)]] if found else []
