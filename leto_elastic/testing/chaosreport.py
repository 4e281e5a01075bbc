"""The table of a chaos campaign: kinds of faults, how many, how many were recovered from, and what they cost."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from leto_elastic.testing.chaos import KINDS, MEANING

BEGIN = "<!-- made by scripts/chaos --report: -->"
END = "<!-- end of the table -->"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one fault.

    Args:
        topology: in words.
        kind: of the fault.
        recovered: all ranks have done a step since, or the job has ended well.
        stall: seconds beyond a normal step until the next one of all ranks; None when there was none.
        lost_steps: done again.
        amid: it struck while another one was being repaired.
    """

    topology: str
    kind: str
    recovered: bool
    stall: float | None
    lost_steps: int
    amid: bool


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one run.

    Args:
        topology: in words.
        replay: the command that does it again.
        seconds: that it took.
        faults: in order.
        wrong: everything that did not hold.
    """

    topology: str
    replay: str
    seconds: float
    faults: tuple[Result, ...]
    wrong: tuple[str, ...]


def append(path: Path, result: RunResult) -> None:
    """Add a run to a file of results, one JSON object a line."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(result) + b"\n")


def read(path: Path) -> list[RunResult]:
    """The runs of such a file; none when it is missing."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=RunResult) for line in path.read_bytes().splitlines()]


def table(runs: Sequence[RunResult]) -> str:
    """Markdown: per topology a table with one row per kind of fault, then the runs in which something was wrong."""
    lines: list[str] = []
    for topology in sorted({run.topology for run in runs}):
        mine = [run for run in runs if run.topology == topology]
        faults = [fault for run in mine for fault in run.faults]
        bad = sum(bool(run.wrong) for run in mine)
        minutes = sum(run.seconds for run in mine) / 60
        lines += [
            f"### {topology}",
            "",
            f"{len(mine)} runs, {minutes:.0f} minutes, {len(faults)} faults; {bad or 'no'} "
            f"{'run' if bad == 1 else 'runs'} with something wrong.",
            "",
            "| fault | count | amid a recovery | recovered | steps lost, all (worst) | stall, median s | worst s |",
            "|---|---|---|---|---|---|---|",
            *rows(faults),
            "",
        ]
    wrong = [run for run in runs if run.wrong]
    if wrong:
        lines += ["### What was wrong", ""]
        for run in wrong:
            first = run.wrong[0].splitlines()[0]
            lines += [f"* {run.topology}: {first}", "", f"      {run.replay}", ""]
    return "\n".join(lines).rstrip() + "\n"


def rows(faults: Sequence[Result]) -> list[str]:
    """One row per kind that there is, and one for all."""
    found = []
    for kind in [kind for kind in KINDS if any(fault.kind == kind for fault in faults)]:
        found.append(_row(MEANING[kind], [fault for fault in faults if fault.kind == kind]))
    return [*found, _row("all", faults)]


def _row(name: str, faults: Sequence[Result]) -> str:
    stalls = [fault.stall for fault in faults if fault.stall is not None]
    lost = [fault.lost_steps for fault in faults]
    cells = [
        name,
        str(len(faults)),
        str(sum(fault.amid for fault in faults)),
        str(sum(fault.recovered for fault in faults)),
        f"{sum(lost)} ({max(lost, default=0)})",
        f"{statistics.median(stalls):.2f}" if stalls else "–",
        f"{max(stalls):.2f}" if stalls else "–",
    ]
    return f"| {' | '.join(cells)} |"


def write(path: Path, runs: Iterable[RunResult]) -> None:
    """Put the tables into a file: in place of those that are there, else at its end."""
    made = f"{BEGIN}\n\n{table(list(runs))}\n{END}\n"
    text = path.read_text() if path.exists() else "# Chaos\n\n"
    if BEGIN in text and END in text:
        before, _, rest = text.partition(BEGIN)
        path.write_text(before + made + rest.partition(END)[2].lstrip("\n"))
    else:
        path.write_text(f"{text.rstrip()}\n\n{made}")
