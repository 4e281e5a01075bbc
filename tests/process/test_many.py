"""Fifty kills in one run: nothing grows, nothing changes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from leto_elastic.testing.job import Resources, resources
from tests.process.runs import Outcome, Reference, train, trainers

pytestmark = [pytest.mark.process, pytest.mark.slow]

KILLS = 50
STEPS = 600


def test_fifty_kills(tmp_path: Path, reference: Reference) -> None:
    """Kills from outside, each as soon as the slot has a shadow again, at whatever the victim does then.

    Rank 0 is never hit, so that its memory, descriptors and threads (and the agent's) can be compared.
    """
    choice = random.Random(4)
    args = ("--parallel", "ddp", "--steps", str(STEPS))
    expected = reference(*args, deadline=200)
    with train(tmp_path / "run", *args, "--pace", "0.12", deadline=400) as job:
        job.wait_event("shadow_ready", count=4)
        survivor = trainers(job)[0]
        early: list[Resources] = []
        for number in range(KILLS):
            rank = choice.randrange(1, 4)
            job.kill(job.pid_of(rank))
            job.wait_event("recovery", count=number + 1)
            job.wait_event("shadow_ready", count=5 + number)
            if number == 5:
                early = [resources(survivor), resources(job.pid)]
        late = [resources(survivor), resources(job.pid)]
        job.expect_success()
        outcome = Outcome(job, STEPS)
        recoveries = job.recoveries()
    assert outcome == expected
    assert len(recoveries) == KILLS
    assert all(recovery["lost_steps"] == 0 for recovery in recoveries)
    for before, after in zip(early, late, strict=True):
        assert after.fds <= before.fds
        assert after.threads <= before.threads
        assert after.rss <= before.rss + 8 * 2**20
