"""The checks of a run under faults: they pass an honest one, and each fails on one that was doctored."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from leto_elastic.testing.chaos import Fault, Kind
from leto_elastic.testing.processes import Resources
from leto_elastic.testing.steplog import Commit, normal_step, stall
from leto_elastic.testing.strikes import Struck
from leto_elastic.testing.verdict import Evidence, Outcome, complaints
from leto_elastic.testing.watching import Digest

STEPS = 8


def struck(kind: Kind, time: float, *pids: int, loss: bool = False) -> Struck:
    return Struck(Fault(time, kind), time, (), frozenset(pids), loss, False, kind)


def commits(pid: int, *steps: int, start: float = 0.0) -> list[Commit]:
    """A step takes a second."""
    return [Commit(step, start + index + 1.0, pid) for index, step in enumerate(steps)]


def outcome() -> Outcome:
    digests = {rank: Digest(STEPS, f"{rank}" * 64) for rank in range(2)}
    return Outcome(digests, {rank: [f"{step} {step + rank} 9" for step in range(STEPS)] for rank in range(2)})


HONEST = Evidence(
    steps=STEPS,
    expected=outcome(),
    found=outcome(),
    commits={
        0: [*commits(10, 0, 1, 2), *commits(10, 3, 4, 5, 6, 7, start=5.0)],
        1: [*commits(11, 0, 1, 2), *commits(12, 2, 3, 4, 5, 6, 7, start=4.0)],
    },
    struck=[struck("kill", 3.2, 11)],
    events=[{"event": "recovery", "epoch": 1, "lost_steps": 0}],
    back=3,
    early={0: Resources(1, 40, 5)},
    late={0: Resources(1, 41, 5)},
    keys=["epoch", "plans/00000001", "failures/00000000/000001", "run"],
    files=["torchelastic_x"],
)


def changed(**fields: object) -> Evidence:
    return replace(HONEST, **fields)


def found(**fields: object) -> Evidence:
    return changed(found=replace(HONEST.found, **fields))


def with_rank_1(*records: Commit, **fields: object) -> Evidence:
    return changed(commits={**HONEST.commits, 1: list(records)}, **fields)


LOSS = [struck("node", 3.2, 11, loss=True)]
BACK_TWO = [*commits(11, 0, 1, 2), *commits(12, 1, 2, 3, 4, 5, 6, 7, start=4.0)]


def test_an_honest_run_passes() -> None:
    assert complaints(HONEST) == []
    assert complaints(with_rank_1(*BACK_TWO, struck=LOSS, events=[{**HONEST.events[0], "lost_steps": 2}])) == []


@pytest.mark.parametrize(
    ("doctored", "words"),
    [
        (lambda: found(digests={**outcome().digests, 1: Digest(STEPS, "f" * 64)}), "digest"),
        (lambda: found(digests={0: outcome().digests[0]}), "digests of ranks [0]"),
        (lambda: found(samples={**outcome().samples, 0: outcome().samples[0][:-1]}), "each once"),
        (lambda: found(samples={**outcome().samples, 0: ["0 0 9", *outcome().samples[0]]}), "each once"),
        (lambda: found(samples={**outcome().samples, 0: ["0 1 9", *outcome().samples[0][1:]]}), "step 0 used"),
        (lambda: changed(struck=[struck("kill", 3.2, 10)]), "nobody hit it"),
        (lambda: changed(struck=[struck("stop", 3.2, 11)]), "nobody hit it"),
        (lambda: changed(struck=[struck("kill", 2.2, 11)]), "after it was killed"),
        (lambda: with_rank_1(*commits(11, 0, 1, 2), *commits(12, 4, 5, 6, 7, start=5.0)), "followed by step 4"),
        (lambda: with_rank_1(*commits(11, *range(STEPS - 1))), "last step is 6"),
        (lambda: with_rank_1(*commits(11, *range(STEPS - 1), 6, 7), struck=[]), "twice without a fault"),
        (lambda: with_rank_1(*BACK_TWO), "no node was lost"),
        (lambda: with_rank_1(*BACK_TWO, struck=LOSS, back=0), "allowed are 0"),
        (lambda: changed(events=[{**HONEST.events[0], "lost_steps": 1}]), "lost 1 steps"),
        (lambda: changed(late={0: Resources(1, 60, 5)}), "descriptors"),
        (lambda: changed(late={1: Resources(1, 60, 5)}), "descriptors"),  # of one that came later
        (lambda: changed(late={0: Resources(1, 40, 20)}), "threads"),
        (lambda: changed(run_state="running"), "the run is running"),
        (lambda: changed(keys=[*(HONEST.keys or ()), "nodes/a"]), "nodes/a"),
        (lambda: changed(keys=["plans/00000002"]), "plans"),
        (lambda: changed(keys=["plans/00000001", "failures/00000002/000000"]), "no plan for"),
        (lambda: changed(files=["leto-abc"]), "directories are left"),
    ],
)
def test_a_doctored_run_does_not_pass(doctored: Callable[[], Evidence], words: str) -> None:
    wrong = complaints(doctored())
    assert any(words in line for line in wrong), wrong


def test_the_stall_is_that_of_the_first_step_begun_after_the_fault() -> None:
    """Rank 1 is hit at 3.2, just before the commit of its step 2, which it has noted and notes again at 5."""
    normal = normal_step(HONEST.commits, [3.2])
    assert normal == 1.0
    cost = stall(HONEST.commits, 3.2, normal)
    assert cost is not None
    assert cost.seconds == pytest.approx(7.0 - 3.2 - 1.0), "step 4: the first that both began after the fault"
    assert cost.lost_steps == 0, "what one rank alone does again is not lost"
    assert stall(HONEST.commits, 100.0, normal) is None


def test_what_is_done_again_is_counted() -> None:
    lost = {0: [*commits(1, 0, 1, 2, 3, 4), *commits(1, 2, 3, 4, 5, 6, start=7.0)]}
    lost[1] = [Commit(record.step, record.time, 2) for record in lost[0]]
    cost = stall(lost, 5.5, 1.0)
    assert cost is not None
    assert cost.lost_steps == 3
    assert all(after.time > before.time for before, after in itertools.pairwise(lost[0]))
