"""When a trainer's state is protected against lost memory: what it votes, keeps and asks of its agent.

The agents code a *due* version while its bytes do not change; how is their business. Here is what all ranks do alike:

* one snapshot buffer: version s is coded from the parameters themselves before VOTE(s). When the vote shows that every
  rank had sent it, it is the protected version from then on, and UPDATE(s) keeps its pre-images in the buffer; only
  then may what the buffer held before be overwritten. Otherwise the next step is due.
* two: UPDATE(s) of a due step keeps them in the buffer that does not hold the protected version, and s is coded from
  there during the following steps (it is *pending*), until a vote shows that every rank had sent it.

Ranks decide without asking each other, so they must decide from the same numbers: the vote's result, which is equal
everywhere, and words that follow from earlier results. A rank that lost the vote's result, but learns that it passed,
takes from the others what they did (`follow`). A rank whose layout changes with this step votes RESET, and everyone
starts anew at its commit: otherwise that rank's next version would never be one that the others have, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from leto_elastic import wire
from leto_elastic.state import snapshot
from leto_elastic.state.header import NO_TAG, Header, Phase, Position, generation_of, tag_of, version_of
from leto_elastic.state.snapshot import RESET
from leto_elastic.worker.link import Link


class Words(NamedTuple):
    """What a rank tells the others when it joins an epoch; tags as in `header`."""

    position: int  # packed
    agreed: int
    kept: int  # the tag under which its last update kept a snapshot, -1 for none, RESET
    newest: int  # of all versions that it holds whole besides its parameters, or is keeping; -1 for none


def last_update(position: Position) -> int:
    """The step whose update this rank is in or has done last."""
    return position.step if position.phase is Phase.UPDATE else position.step - 1


def words_of(header: Header) -> Words:
    """The words of this rank."""
    position = header.position
    newest = max(header.agreed, *header.buffers, header.target[0])
    return Words(position.pack(), header.agreed, snapshot.kept_tag(header, last_update(position)), newest)


class Protection:
    """One trainer's part; does nothing when `buffers` is 0.

    Args:
        header: of the trainer.
        link: to the agent.
        buffers: snapshot buffers, 0 to 2.
        every: steps from one protected version to the next.
        until: the number of steps; later ones are not protected.
    """

    def __init__(self, header: Header, link: Link, buffers: int, every: int, until: int) -> None:
        self._header = header
        self._link = link
        self._buffers = buffers
        self._every = every
        self._until = until
        self.generation = 0

    # ---- the vote

    def ballot(self, fresh: Callable[[], list[int]]) -> int:
        """What this rank votes: the newest version that its agent has sent, RESET when there are `fresh` parameters."""
        if not self._buffers:
            return 0
        if fresh():
            return RESET
        sent = self._header.sent
        return sent if sent != NO_TAG and generation_of(sent) == self.generation else NO_TAG

    def decide(self, step: int, lowest: int) -> None:
        """The vote of `step` passed, its result is the lowest of all ballots: settle what its update keeps."""
        header = self._header
        if lowest == RESET:
            snapshot.reset(header)
        elif self._buffers == 1 and lowest >= 0 and version_of(lowest) == step:
            header.agreed = lowest
            snapshot.begin(header, lowest, 0)
        elif self._buffers == 2:
            pending = self._pending()
            if pending is not None and lowest >= header.buffers[pending]:
                header.agreed, pending = header.buffers[pending], None
            if pending is None and self._is_due(step):
                snapshot.begin(header, tag_of(step, self.generation), self._free())
            else:
                snapshot.clear(header)
        else:
            snapshot.clear(header)

    def follow(self, rows: Sequence[Words]) -> None:
        """The vote's result was lost here, but it passed: do as those did who have it."""
        if not self._buffers:
            return
        header, step = self._header, self._header.position.step
        ahead = [row for row in rows if last_update(Position.unpack(row.position)) == step]
        kept = max(row.kept for row in ahead)
        if min(row.kept for row in ahead) == RESET or max(row.newest for row in ahead) == NO_TAG:
            snapshot.reset(header)
            return
        header.agreed = max(row.agreed for row in ahead)
        if kept == NO_TAG:
            snapshot.clear(header)
        else:
            snapshot.begin(header, kept, 0 if self._buffers == 1 else self._free())

    # ---- the commit

    def before_commit(self, step: int) -> None:
        """Everything of `step` is done; what is protected is forgotten when the layout changes."""
        snapshot.complete(self._header, step)
        if self._header.target[0] == RESET:
            snapshot.forget(self._header)

    def after_commit(self) -> None:
        """The header says the next step."""
        if self._buffers:
            snapshot.clear(self._header)
            position = self._header.position
            self._link.send(wire.Stepped(step=position.step, slot=position.slot))

    def ask(self, *, again: bool = False) -> None:
        """Tell the agent which version to protect now, if any; `again`: also one that it was told of before."""
        header, position = self._header, self._header.position
        if self._buffers == 2:
            pending = self._pending()
            if pending is not None and (again or version_of(header.buffers[pending]) == position.step - 1):
                self._due(version_of(header.buffers[pending]), slot=-1, buffer=pending)
        elif self._buffers and position.step < self._until and self._is_due(position.step):
            self._due(position.step, slot=position.slot, buffer=-1)

    def _due(self, step: int, *, slot: int, buffer: int) -> None:
        self._link.send(wire.Due(step=step, generation=self.generation, slot=slot, buffer=buffer))

    # ---- after a failure

    def joined(self) -> None:
        """In a new epoch, at the start of a step: drop what cannot become protected any more."""
        header, step = self._header, self._header.position.step
        if version_of(header.agreed) > step:
            header.agreed = NO_TAG
        for buffer, tag in enumerate(header.buffers):
            stale = tag > header.agreed and generation_of(tag) != self.generation
            if tag != NO_TAG and (stale or version_of(tag) > step):
                header.set_buffer(buffer, NO_TAG)
        snapshot.clear(header)

    # ----

    def _is_due(self, step: int) -> bool:
        agreed = self._header.agreed
        return agreed == NO_TAG or generation_of(agreed) != self.generation or step - version_of(agreed) >= self._every

    def _pending(self) -> int | None:
        """The buffer that holds a version which is not protected yet."""
        header = self._header
        for buffer, tag in enumerate(header.buffers):
            if tag > header.agreed and generation_of(tag) == self.generation:
                return buffer
        return None

    def _free(self) -> int:
        """The buffer that does not hold the protected version."""
        header = self._header
        return 1 if header.agreed != NO_TAG and header.buffers[0] == header.agreed else 0
