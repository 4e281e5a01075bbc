"""What the agent knows about its slots and their processes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from leto_elastic.launch.actions import Death, Kind
from leto_elastic.recovery.ladder import ShadowState
from leto_elastic.recovery.policy import FailureClass
from leto_elastic.state.header import Position, Signs


class Blob(NamedTuple):
    """A memfd with `size` bytes of content, owned by the agent; `version` orders manifests."""

    fd: int
    size: int
    version: int = 0


class HeaderView(Protocol):
    """Of a trainer's header, what the agent reads and resets; see `leto_elastic.state.header`."""

    last_words: float
    beat: float
    paused: float
    waiting: int
    thread: int

    @property
    def valid(self) -> bool: ...

    @property
    def position(self) -> Position: ...

    @property
    def signs(self) -> Signs: ...

    @property
    def groups(self) -> dict[int, tuple[int, int]]: ...


class Held(Protocol):
    """The segments of a slot, as the state machine sees them."""

    fds: dict[str, int]
    sizes: dict[str, int]

    @property
    def header(self) -> HeaderView | None: ...


@dataclass
class Member:
    """A live process of a slot."""

    key: int
    slot: int
    kind: Kind
    pid: int
    greeted: bool = False
    rehearsed: bool = False
    ready: bool = False
    parked: bool = False  # a trainer that waits for a plan
    dismissed: bool = False  # killed because memory was short
    attached: int = -1  # version of the manifest it was given
    failing: str | None = None
    oom: bool = False  # what it is failing with is want of memory
    held: bool = False  # it is alive and holds what it is failing with
    surrendered: bool = False  # and was told to end by it
    quitting: str | None = None  # it ends in a way that is not to be repaired
    planned: int = -1  # newest epoch that it was given a plan of


@dataclass
class Slot:
    """A place for one worker of this node."""

    index: int
    rank: int
    held: Held
    trainer: Member | None = None
    standby: Member | None = None
    spawning: bool = False  # a standby was asked for and has not been started yet
    record: Blob | None = None
    manifest: Blob | None = None
    finished: bool = False
    done: bool = False
    death: Death | None = None  # not yet covered by a plan
    awaiting: bool = False  # covered by a plan, no trainer yet
    lost: bool = False  # its memory was on a node that is gone, and is not restored yet
    alone: bool = False  # replaced after the training was over, which is done once
    unfit: bool = False
    quick_deaths: int = 0
    verdict: FailureClass | None = None  # why its trainer is being ended, when its exit code does not tell
    detail: str = ""  # the same, for a human

    @property
    def protected(self) -> bool:
        """Its state outlives its trainer, here or on other nodes."""
        return self.manifest is not None or self.lost

    @property
    def shadow(self) -> ShadowState:
        """As the leader sees it."""
        if self.standby is not None:
            return "ready" if self.standby.ready else "starting"
        return "unfit" if self.unfit else "none"

    def position(self) -> Position | None:
        """Where the slot's trainer is or was; None before it has a header."""
        header = self.held.header
        return header.position if header is not None and header.valid else None

    def died(self, noticed: float) -> float:
        """When the trainer ended: its last words if it left some, else when it was noticed."""
        header = self.held.header
        if header is None or not header.valid or header.last_words <= 0.0:
            return noticed
        words, header.last_words = header.last_words, 0.0
        return min(words, noticed)

    def killed_for_memory(self, member: Member, told: str) -> None:
        """The end of a process of this slot, which is about to be dealt with, was the kernel's doing."""
        member.dismissed = True
        if member is self.trainer or self.awaiting:
            self.verdict, self.detail = FailureClass.OOM, told

    def mourn(self, member: Member, code: int, *, held: bool = False) -> Death:
        """The record of a trainer's end; `held`: it has not ended, and holds an exception."""
        position = self.position()
        verdict, self.verdict = self.verdict, None
        detail, self.detail = self.detail or member.failing or "", ""
        if verdict is not None:
            cause = verdict
        elif self.lost:
            cause = FailureClass.STATE
        elif code < 0:
            cause = FailureClass.SIGNAL
        elif member.oom:
            cause = FailureClass.OOM
        else:
            cause = FailureClass.EXCEPTION if member.failing is not None else FailureClass.EXIT
        return Death(
            rank=self.rank,
            slot=self.index,
            pid=member.pid,
            code=code,
            cause=cause,
            step=position.step if position else 0,
            phase=position.phase.name.lower() if position else "setup",
            chunk=position.chunk if position else 0,
            detail=detail,
            held=held,
            digest=_digest(member.failing) if member.failing is not None and code >= 0 else "",
        )


def _digest(reason: str) -> str:
    return hashlib.blake2b(reason.encode(), digest_size=8).hexdigest()
