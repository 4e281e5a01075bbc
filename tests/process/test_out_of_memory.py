"""A rank that takes too much memory: told as such, repaired, and idle shadows make room."""

from __future__ import annotations

from pathlib import Path

import pytest

from leto_elastic.testing.job import TORCHRUN, Job
from tests.process.groups import JOIN, limited
from tests.process.runs import TRAIN, Outcome, Reference, trainers

pytestmark = pytest.mark.process

ARGS = ("--parallel", "fsdp", "--hold", "3:2")

POLICY = "state: {chunk_bytes: 65536}\nshadow: {retry_after: 0.5}\n"


def test_killed_by_the_kernel_under_a_real_limit(tmp_path: Path, reference: Reference) -> None:
    expected = reference(*ARGS, nproc=2)
    (tmp_path / "policy.yaml").write_text(POLICY)
    with (
        limited(2 << 30) as group,
        Job(
            TRAIN,
            *ARGS,
            run_dir=tmp_path / "run",
            nproc=2,
            faults="eat rank=1 step=5 phase=compute",
            conf={"config": str(tmp_path / "policy.yaml")},
            launcher=(*JOIN, str(group), *TORCHRUN),
        ) as job,
    ):
        job.expect_success()
        assert Outcome(job, 9, 2) == expected
        assert job.pid_of(0) == trainers(job, 2)[0], "a survivor's pid changed"
        (failure,) = [event for event in job.events() if event["event"] == "failure"]
        assert (failure["rank"], failure["cause"]) == (1, "oom")
        assert f"the limit of the control group {group} is 2048 MiB" in str(failure["detail"])
        (recovery,) = job.recoveries()
        assert recovery["lost_steps"] == 0
        given_up = [event for event in job.events() if event["event"] == "shadow_given_up"]
        assert 0 in {event["slot"] for event in given_up}, "the idle shadow of the other slot"


def test_other_kills_are_signals(tmp_path: Path) -> None:
    """Also in a group that counts, nothing is taken for a lack of memory that was none."""
    with (
        limited(8 << 30) as group,
        Job(
            TRAIN,
            *ARGS,
            run_dir=tmp_path / "run",
            nproc=2,
            faults="kill rank=1 step=5 phase=compute",
            launcher=(*JOIN, str(group), *TORCHRUN),
        ) as job,
    ):
        job.expect_success()
        (failure,) = [event for event in job.events() if event["event"] == "failure"]
        assert failure["cause"] == "signal"
        assert not [event for event in job.events() if event["event"] == "shadow_given_up"]


def test_an_allocation_that_fails(tmp_path: Path, reference: Reference) -> None:
    expected = reference(*ARGS, nproc=2)
    faults = "alloc rank=1 step=5 phase=backward"
    (tmp_path / "policy.yaml").write_text(POLICY)
    conf = {"config": str(tmp_path / "policy.yaml")}
    with Job(TRAIN, *ARGS, run_dir=tmp_path / "run", nproc=2, faults=faults, conf=conf) as job:
        job.expect_success()
        assert Outcome(job, 9, 2) == expected
        (failure,) = [event for event in job.events() if event["event"] == "failure"]
        assert (failure["rank"], failure["cause"]) == (1, "oom")
        assert "DefaultCPUAllocator: can't allocate memory" in str(failure["detail"])
