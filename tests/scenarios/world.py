"""A job as its headers tell it: ranks that walk through the phases of a step, die at any point, and resolve.

The model behind the property tests of `resolve`, and the vocabulary of the stories in this directory. It knows nothing
of tensors. It keeps a ledger of what each rank applied, so that a test can say: every step once, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable

from leto_elastic.recovery.resolution import Resolution, resolve
from leto_elastic.state.header import Phase, Position


class World:
    """`ranks` trainers that run `until` steps of `chunks` chunks; `due(step)` sections precede a step."""

    def __init__(self, ranks: int, until: int, chunks: int = 2, due: Callable[[int], int] = lambda step: 0) -> None:
        self.until = until
        self.chunks = chunks
        self.due = due
        self.at = {rank: self.start_of(0) for rank in range(ranks)}
        self.dead: set[int] = set()
        self.applied: dict[int, list[int]] = {rank: [] for rank in range(ranks)}
        self.left_sections: dict[int, set[tuple[int, int]]] = {rank: set() for rank in range(ranks)}
        self.passed: set[int] = set()
        self._voted: dict[int, set[int]] = {}
        self._todo: dict[int, Resolution] = {}

    def start_of(self, step: int, section: int = 0) -> Position:
        """Where a rank stands right after the commit of the step before, from section `section` on."""
        if section < self.due(step):
            return Position(step, Phase.SECTION, chunk=section)
        return Position(step, Phase.DONE if step == self.until else Phase.COMPUTE)

    def move(self, rank: int) -> bool:
        """One move of one rank, the smallest there is; False when it is dead, waits for others, or is done."""
        if rank in self.dead:
            return False
        resolution = self._todo.get(rank)
        if resolution is not None and self._resolving(rank, resolution):
            return True
        at = self.at[rank]
        match at.phase:
            case Phase.SECTION:
                self.left_sections[rank].add((at.step, at.chunk))
                self.at[rank] = self.start_of(at.step, at.chunk + 1)
            case Phase.COMPUTE:
                self._voted.setdefault(at.step, set()).add(rank)
                self.at[rank] = at._replace(phase=Phase.VOTE)
            case Phase.VOTE:
                if self._voted.get(at.step, set()) != self.at.keys():
                    return False
                self.passed.add(at.step)
                self.at[rank] = at._replace(phase=Phase.UPDATE, chunk=0)
            case Phase.UPDATE:
                self._update(rank, at)
            case _:
                return False
        return True

    def _update(self, rank: int, at: Position) -> None:
        if at.torn:
            self.at[rank] = at._replace(torn=False, chunk=at.chunk + 1)
        elif at.chunk < self.chunks:
            self.at[rank] = at._replace(torn=True)
        else:
            self.applied[rank].append(at.step)
            self.at[rank] = self.start_of(at.step + 1)

    def _resolving(self, rank: int, resolution: Resolution) -> bool:
        """Carry a resolution on by one move; False when this rank has nothing left of it to do."""
        at = self.at[rank]
        if resolution.action[rank] == "forward" and at.step < resolution.step:
            if at.phase is Phase.VOTE:
                self.at[rank] = at._replace(phase=Phase.UPDATE, chunk=0)
            else:
                self._update(rank, at)
            return True
        del self._todo[rank]
        section = self.due(resolution.step) if resolution.section is None else resolution.section
        start = self.start_of(resolution.step, section)
        moved, self.at[rank] = at != start, start
        return moved

    def kill(self, rank: int) -> None:
        """The process is gone; what its header says stays."""
        self.dead.add(rank)

    def recover(self) -> Resolution:
        """A new epoch: every rank has a process again and has resolved, but has not moved yet."""
        resolution = resolve(self.at)
        self.dead.clear()
        self._voted.clear()
        self._todo = dict.fromkeys(self.at, resolution)
        return resolution

    def step_over(self, step: int) -> None:
        """Everyone, right after a resolution that would run `step`, goes on with the next one."""
        self._todo.clear()
        self.at = dict.fromkeys(self.at, self.start_of(step + 1))

    def finish(self) -> None:
        """Everyone moves until all are done. Raises AssertionError when the job is stuck."""
        moving = True
        while moving:
            moves = [self.move(rank) for rank in self.at]
            moving = any(moves)
        assert all(at.phase is Phase.DONE for at in self.at.values()), f"stuck at {self.at}"
