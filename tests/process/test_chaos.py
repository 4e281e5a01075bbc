"""A short chaos campaign with fixed seeds: random faults from outside, and the outcome of the undisturbed run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from leto_elastic.testing.chaos import Topology, run_seed, schedule
from leto_elastic.testing.verdict import Outcome
from tests.process.campaign import LEASE, Plan, main, reference, run
from tests.process.unsurvivable import end_of

pytestmark = [pytest.mark.process, pytest.mark.slow]

ONE = Topology(lease=LEASE)
THREE = Topology(nodes=3, per_node=1, parity=1, lease=LEASE)
"""Three nodes of one rank each."""


@pytest.mark.parametrize(
    ("seed", "plan", "wanted"),
    [
        pytest.param(
            4,
            Plan(topology=ONE, parallel="fsdp", steps=90, count=9, gap=0.6),
            {"kill", "abrt", "several", "both", "shadow", "etcd_kill", "agent_stop"},
            id="fsdp",
        ),
        pytest.param(
            9,
            Plan(topology=ONE, parallel="ddp", steps=90, count=9, gap=0.6),
            {"kill", "several", "stop", "shadow", "agent_stop", "agent_freeze"},
            id="ddp",
        ),
        pytest.param(
            5,
            Plan(topology=THREE, steps=90, count=5, gap=1.0),
            {"kill", "several", "stop", "node", "leader"},
            id="nodes",
            marks=pytest.mark.nodes,
        ),
    ],
)
def test_random_faults_change_nothing(seed: int, plan: Plan, wanted: set[str], tmp_path: Path) -> None:
    """The seeds are chosen for the variety of what they make."""
    faults = schedule(run_seed(seed, 0), plan.topology, count=plan.count, gap=plan.gap)
    assert {fault.kind for fault in faults} == wanted
    expected = reference(plan, tmp_path / "reference")
    result = run(plan, faults, expected, tmp_path / "run")
    assert result.wrong == ()
    assert len(result.faults) >= plan.count, "one may have found no target, and one more comes at the end"
    assert all(fault.recovered for fault in result.faults)
    assert plan.topology.nodes > 1 or not any(fault.lost_steps for fault in result.faults)


def test_a_fault_that_no_job_survives_ends_it_clearly(tmp_path: Path) -> None:
    plan = Plan(topology=ONE, steps=20)
    expected = reference(plan, tmp_path / "reference")
    ending = end_of("early", plan, expected, tmp_path / "run", random.Random(1), print)
    assert ending.wrong == []


def test_what_is_wrong_is_told_with_a_line_that_does_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check is doctored, so that it finds something, and needs no undisturbed run."""
    monkeypatch.setattr("tests.process.campaign.reference", lambda plan, directory: Outcome({}, {}))
    monkeypatch.setattr("tests.process.campaign.complaints", lambda evidence: ["rank 0: doctored"])
    plan = "0.1 kill pick=1 count=1 hold=0"
    options = ["--nodes", "1", "--parallel", "fsdp", "--per-run", "1", "--gap", "1", "--parity", "1", "--seed", "7"]
    arguments = [*options, "--plan", plan, "--keep", str(tmp_path / "kept")]
    report = tmp_path / "report.md"
    assert main([*arguments, "--report", str(report)]) == 1
    said = capsys.readouterr().out
    assert "rank 0: doctored" in said
    assert f"again: scripts/chaos {' '.join(options)} --run 0 --plan '{plan}'" in said
    assert (tmp_path / "kept" / "run0" / "run" / "events.jsonl").exists()
    assert "SIGKILL of a trainer | 1 |" in report.read_text()
    assert "rank 0: doctored" in report.read_text()
