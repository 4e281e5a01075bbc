"""What an agent knows of a run from its keys: who is there, who takes part, what happens. Pure."""

from __future__ import annotations

from typing import NamedTuple

from leto_elastic.coordinator.client import Batch, Event, Snapshot
from leto_elastic.coordinator.schema import FailureRecord, Keys, NodeRecord, PlanRecord, RunRecord, decode


class Present(NamedTuple):
    """All nodes that are there (told at the beginning, and whenever changes may have been missed)."""

    nodes: frozenset[str]


class Came(NamedTuple):
    """A node is there, perhaps again after its lease had ended."""

    node: str


class Gone(NamedTuple):
    """A node has left, or its lease has ended."""

    node: str


class Failed(NamedTuple):
    """A rank has failed in an epoch."""

    epoch: int
    record: FailureRecord


class Said(NamedTuple):
    """What the node at a position said on the way into an epoch."""

    epoch: int
    stage: str
    position: int
    payload: bytes


class Ended(NamedTuple):
    """The run has ended; why, when it failed."""

    state: str
    reason: str


News = PlanRecord | Present | Came | Gone | Failed | Said | Ended


class Roster:
    """The nodes of a run, for an agent that wants to take part.

    Attributes:
        nodes, revisions: who is there, and the revision at which each came.
        run, entry: how the run stands, decoded and as it is written; None: nobody has ever begun it.
        plan: the newest one, which says who takes part.
    """

    def __init__(self, keys: Keys, node: str) -> None:
        self._keys = keys
        self._node = node
        self._clear()

    def _clear(self) -> None:
        self.nodes: dict[str, NodeRecord] = {}
        self.revisions: dict[str, int] = {}
        self.run: RunRecord | None = None
        self.entry: bytes | None = None
        self.plan: PlanRecord | None = None

    def apply(self, view: Snapshot | Batch) -> None:
        """Take a snapshot, or changes, in."""
        if isinstance(view, Snapshot):
            self._clear()
            events = [Event(entry.key, entry, entry.mod_revision) for entry in view.entries]
            events.sort(key=lambda event: event.key != self._keys.start)  # plans follow it
        else:
            events = list(view.events)
        for event in events:
            self._apply(event)

    def _apply(self, event: Event) -> None:
        keys, key, entry = self._keys, event.key, event.entry
        if key.startswith(keys.nodes):
            node = keys.node_of(key)
            self.nodes.pop(node, None)
            self.revisions.pop(node, None)
            if entry is not None:
                self.nodes[node] = decode(key, entry.value, NodeRecord)
                self.revisions[node] = entry.create_revision
        elif entry is None:
            if self.plan is not None and key == keys.plan(self.plan.epoch):
                self.plan = None
        elif key == keys.run:
            self.run, self.entry = decode(key, entry.value, RunRecord), entry.value
        elif key == keys.start or key.startswith(keys.plans):
            plan = decode(key, entry.value, PlanRecord)
            if key == keys.start or self.plan is None or plan.epoch > self.plan.epoch:
                self.plan = plan

    @property
    def members(self) -> tuple[str, ...]:
        """Who takes part, by position; whether or not they are there."""
        return tuple(seat.node for seat in self.plan.nodes) if self.plan is not None else ()

    @property
    def member(self) -> bool:
        """Whether this node takes part in a run that goes on."""
        return self.running and self._node in self.members

    @property
    def running(self) -> bool:
        """Whether the run is going on: somebody who takes part is there."""
        return self.run is not None and any(node in self.nodes for node in self.members)

    def fresh(self) -> list[str]:
        """The nodes with slots that could begin a run, the first to come first."""
        able = (node for node, record in self.nodes.items() if record.slots and node not in self.members)
        return sorted(able, key=self.revisions.__getitem__)
