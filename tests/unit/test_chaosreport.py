"""The table of a chaos campaign."""

from __future__ import annotations

from pathlib import Path

from leto_elastic.testing.chaosreport import BEGIN, Result, RunResult, append, read, rows, table, write


def fault(kind: str, stall: float | None, *, recovered: bool = True, lost: int = 0, amid: bool = False) -> Result:
    return Result(topology="T", kind=kind, recovered=recovered, stall=stall, lost_steps=lost, amid=amid)


FAULTS = (
    fault("node", 4.0, lost=3),
    fault("kill", 1.0),
    fault("kill", 0.5, amid=True),
    fault("kill", 3.0),
    fault("kill", None, recovered=False),
)


def run(*wrong: str) -> RunResult:
    return RunResult(topology="T", replay="scripts/chaos --seed 1", seconds=90.0, faults=FAULTS, wrong=wrong)


def test_a_row_per_kind() -> None:
    assert rows(FAULTS) == [
        "| SIGKILL of a trainer | 4 | 1 | 3 | 0 (0) | 1.00 | 3.00 |",
        "| SIGKILL of all processes of a node | 1 | 0 | 1 | 3 (3) | 4.00 | 4.00 |",
        "| all | 5 | 1 | 4 | 3 (3) | 2.00 | 4.00 |",
    ]
    assert rows([]) == ["| all | 0 | 0 | 0 | 0 (0) | – | – |"]


def test_what_was_wrong_is_told_with_its_replay() -> None:
    made = table([run(), run("rank 1: digest differs\nmore")])
    assert "2 runs, 3 minutes, 10 faults; 1 run with something wrong." in made
    assert "* T: rank 1: digest differs\n\n      scripts/chaos --seed 1" in made
    assert "no runs with something wrong" in table([run()])


def test_results_of_several_campaigns_make_one_report(tmp_path: Path) -> None:
    results, report = tmp_path / "results.jsonl", tmp_path / "chaos.md"
    assert read(results) == []
    for _ in range(2):
        append(results, run())
    assert read(results) == [run(), run()]
    report.write_text("# Words\n\nbefore\n")
    write(report, [run()])
    report.write_text(report.read_text() + "\nafter\n")
    write(report, read(results))
    text = report.read_text()
    assert text.startswith("# Words\n\nbefore\n\n")
    assert text.endswith("\nafter\n")
    assert text.count(BEGIN) == 1
    assert "2 runs, 3 minutes, 10 faults" in text
