"""Steps that raise, and numbers gone bad: run again by the same process, by another one, stepped over, or the end."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from leto_elastic.testing.cluster import Cluster
from leto_elastic.testing.job import Job
from tests.process.runs import Outcome, Reference, train, trainers, wait_stopped
from tests.process.scene import ARGS, check, scene

pytestmark = pytest.mark.process

RETRY = ["retry", "promote", "fail"]
FSDP = ("--parallel", "fsdp")


def policy(tmp_path: Path, exception: list[str] | None = RETRY, **sections: Any) -> Path:
    path = tmp_path / "policy.yaml"
    classes = {"classes": {"exception": exception}} if exception else {}
    path.write_text(yaml.safe_dump({"state": {"chunk_bytes": 65536}, **classes, **sections}))
    return path


def same_pids(job: Job | Cluster, *others: int) -> None:
    """All ranks but the others have kept their processes."""
    before = trainers(job)
    changed = [rank for rank in range(4) if job.pid_of(rank) != before[rank]]
    assert changed == sorted(others)


def told(job: Job, event: str) -> list[dict[str, Any]]:
    return [dict(told) for told in job.events() if told["event"] == event]


def tracebacks(job: Job) -> list[str]:
    """The frames of each traceback on the screen of a rank's exception."""
    return re.findall(
        r"Traceback \(most recent call last\):\n((?:.*\n)*?).*NameError: name 'lr' is not defined", job.output()
    )


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("phase", ["backward", "vote"])
def test_the_same_process_runs_its_step_again(phase: str, parallel: str, tmp_path: Path, reference: Reference) -> None:
    """Also when a backward pass was left half-way; then the following steps show whether the buckets are right."""
    args = ("--parallel", parallel)
    expected = reference(*args)
    fault = f"raise rank=1 step=5 phase={phase}"
    with train(tmp_path / "run", *args, faults=fault, config=policy(tmp_path)) as job:
        job.expect_success()
        same_pids(job)
        assert Outcome(job, 9) == expected
        (recovery,) = job.recoveries()
        assert (recovery["action"], recovery["cause"], recovery["lost_steps"]) == ("retry", "exception", 0)
        (failure,) = told(job, "failure")
        assert failure["held"]
        assert failure["detail"].startswith("InjectedFault: fault 1 of LETO_FAULTS: rank 1")


def test_a_second_time_another_process_does(tmp_path: Path, reference: Reference) -> None:
    expected = reference(*FSDP)
    fault = "; ".join(["raise rank=1 step=5 phase=backward"] * 2)
    with train(tmp_path / "run", *FSDP, faults=fault, config=policy(tmp_path)) as job:
        job.expect_success()
        same_pids(job, 1)
        assert Outcome(job, 9) == expected
        (recovery,) = job.recoveries()
        assert recovery["actions"] == {"1": "promote"}
        assert len(told(job, "failure")) == 2, "the end of the first process is not another failure"


def test_a_batch_that_always_raises_ends_the_job(tmp_path: Path) -> None:
    with train(tmp_path / "run", *FSDP, "--trouble", "bug:1:5", config=policy(tmp_path)) as job:
        assert job.expect_failure() == 1
        assert [(failure["rank"], failure["step"]) for failure in told(job, "failure")] == [(1, 5)] * 3
        assert not job.recoveries()
        last = job.output()[job.output().index("leto: the job ends:") :]
        assert "NameError: name 'lr' is not defined" in last
        assert "exitcode  : 1" in last
        found = tracebacks(job)
        assert found
        assert not [frames for frames in found if "leto_elastic/worker" in frames], "no frame of leto"


def test_or_is_stepped_over(tmp_path: Path, reference: Reference) -> None:
    expected = reference(*FSDP, "--trouble", "pass:all:5")
    config = policy(tmp_path, step={"skip": True})
    with train(tmp_path / "run", *FSDP, "--trouble", "bug:1:5", config=config) as job:
        job.expect_success()
        same_pids(job)
        assert Outcome(job, 9) == expected
        (skipped,) = told(job, "skipped")
        assert (skipped["step"], skipped["total"]) == (5, 1)
        assert job.output().count("leto: step 5 was stepped over") == 1


def test_also_when_a_rank_is_killed_on_the_way(tmp_path: Path, reference: Reference) -> None:
    expected = reference(*FSDP, "--trouble", "pass:all:5")
    config = policy(tmp_path, step={"skip": True})
    args = (*FSDP, "--trouble", "bug:1:5")
    with train(tmp_path / "run", *args, faults="kill rank=2 step=5 phase=commit", config=config) as job:
        job.expect_success()
        same_pids(job, 2)
        assert Outcome(job, 9) == expected


@pytest.mark.parametrize("ladder", [RETRY, ["promote", "respawn", "fail"]])
def test_what_every_rank_raises_is_not_repaired(ladder: list[str], tmp_path: Path) -> None:
    config = policy(tmp_path, ladder)
    with train(tmp_path / "run", "--parallel", "ddp", "--trouble", "bug:all:5", config=config) as job:
        assert job.expect_failure() == 1
        assert not job.recoveries()
        last = job.output()[job.output().index("leto: the job ends:") :]
        assert "every rank raised the same error in step 5: NameError: name 'lr' is not defined" in last
        assert "exitcode  : 1" in last


@pytest.mark.parametrize(
    ("kind", "said", "code"),
    [("exit", "SystemExit: 3", "exitcode  : 3"), ("interrupt", "KeyboardInterrupt: ", "")],
)
def test_what_is_no_failure_ends_the_job(kind: str, said: str, code: str, tmp_path: Path) -> None:
    with train(tmp_path / "run", *FSDP, "--trouble", f"{kind}:1:5", config=policy(tmp_path)) as job:
        assert job.expect_failure() == 1
        assert not told(job, "failure")
        last = job.output()[job.output().index("leto: the job ends:") :]
        assert f"rank 1 left the training in step 5 by {said}" in last
        assert code in last


@pytest.mark.parametrize("who", ["all", "1"])
def test_exit_code_0_is_a_success_of_all_or_none(who: str, tmp_path: Path) -> None:
    with train(tmp_path / "run", *FSDP, "--trouble", f"leave:{who}:5") as job:
        if who == "all":
            job.expect_success()
        else:
            job.expect_failure()
            assert "rank 1 left the training in step 5 by SystemExit: 0" in job.output()
        assert not told(job, "recovery")


def test_after_the_vote_the_step_is_rolled_forward(tmp_path: Path, reference: Reference) -> None:
    expected = reference(*FSDP)
    fault = "raise rank=1 step=5 phase=update chunk=mid"
    with train(tmp_path / "run", *FSDP, faults=fault, config=policy(tmp_path)) as job:
        job.expect_success()
        same_pids(job, 1)
        assert Outcome(job, 9) == expected
        (recovery,) = job.recoveries()
        assert (recovery["action"], recovery["resolution"]) == ("promote", "forward")


@pytest.mark.parametrize("victim", [1, 2])
def test_a_process_is_killed_while_one_holds(victim: int, tmp_path: Path, reference: Reference) -> None:
    """With parity nobody goes on before all stand, and rank 2 does not: so rank 1 holds for as long as that."""
    expected = reference(*FSDP)
    config = policy(tmp_path, protect={"local": {"parity": 1}})
    faults = "stop rank=2 step=5 phase=compute; raise rank=1 step=5 phase=body"
    with train(tmp_path / "run", *FSDP, faults=faults, config=config) as job:
        pids = {int(str(e["pid"])): e for e in [job.wait_event("worker_started", role="trainer", rank=2)]}
        (stopped,) = pids
        job.wait_event("failure", rank=1)
        wait_stopped(job, stopped)
        job.kill(trainers(job)[victim], signal.SIGKILL)
        if victim == 1:
            job.wait_event("failure", rank=1, count=2)
            job.kill(stopped, signal.SIGCONT)
        job.expect_success()
        same_pids(job, victim)
        assert Outcome(job, 9) == expected
        assert job.recoveries()[-1]["actions"] == ({"1": "promote"} if victim == 1 else {"1": "retry", "2": "promote"})


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_gradients_that_are_not_finite_are_not_applied(parallel: str, tmp_path: Path, reference: Reference) -> None:
    """Seen by one rank only, and with ranks that are killed amid that step and a later one."""
    args = ("--parallel", parallel)
    expected = reference(*args, "--trouble", "idle:all:5")
    config = policy(tmp_path, None, step={"nonfinite": "skip"})
    faults = "kill rank=3 step=5 phase=commit; kill rank=2 step=7 phase=update chunk=mid"
    with train(tmp_path / "run", *args, "--trouble", "nan:1:5", faults=faults, config=config) as job:
        job.expect_success()
        same_pids(job, 2, 3)
        assert Outcome(job, 9) == expected
        (skipped,) = told(job, "skipped")
        assert skipped["step"] == 5
        assert skipped["reason"].startswith("gradients of rank 1 are not finite")


def test_or_end_the_job(tmp_path: Path) -> None:
    config = policy(tmp_path, step={"nonfinite": "fail"})
    with train(tmp_path / "run", *FSDP, "--trouble", "nan:1:5", config=config) as job:
        assert job.expect_failure() == 1
        assert not told(job, "failure")
        assert "NotFinite: step 5: gradients of rank 1 are not finite" in job.output()


@pytest.mark.nodes
def test_on_two_nodes(tmp_path: Path, reference: Reference) -> None:
    expected = reference(*ARGS, deadline=240)
    fault = "raise rank=1 step=8 phase=backward"
    with scene(tmp_path, nodes=2, faults=fault, classes={"exception": RETRY}) as job:
        check(job, expected, moved=[1])
        assert job.cluster.pid_of(1) == job.first[1], "it runs its step again itself"
        assert {told["action"] for told in job.cluster.recoveries()} == {"retry"}
