"""What leto costs while nothing fails: step time and memory against the plain script, in alternating rounds.

    python benchmarks/overhead.py --parallel ddp fsdp --rounds 5

A round runs both systems one after the other, the order changing from round to round, and compares them with each
other only. Step times are rank 0's, after the shadows are parked. Memory of a trainer is its RSS without file-backed
pages, that is anonymous memory and segments, shared or not, as if it ran alone (a forked process maps fewer pages of
libraries, which would flatter leto). PSS of trainers, shadows and the rest of the job is given apart, because segments
and a forked interpreter are shared between processes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from jobs import ROOT, Job, table

sys.path.insert(0, str(ROOT / "examples"))

import lm

SCRIPTS = {"leto": "examples/train_lm.py", "plain": "examples/train_lm_plain.py"}
MIB = float(1 << 20)


class Sample(NamedTuple):
    """One job: seconds a step (median, mean), bytes a trainer (mean), PSS of trainers, shadows and the rest."""

    median: float
    mean: float
    trainer: float
    trainers_pss: float
    shadows_pss: float
    others_pss: float


def memory(pid: int) -> tuple[int, int]:
    """(RSS without file-backed pages, PSS) of a process in bytes; zeros when it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text() + Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0, 0
    fields = {words[0]: int(words[1]) * 1024 for line in text.splitlines() if (words := line.split())[-1:] == ["kB"]}
    return fields["RssAnon:"] + fields["RssShmem:"], fields["Pss:"]


def measure(system: str, parallel: str, args: argparse.Namespace, directory: Path) -> Sample:
    """Run one job and take its figures while it trains."""
    options = [f"--parallel={parallel}", f"--size={args.size}", "--steps=1000000"]
    with Job(system, SCRIPTS[system], options, args.ranks, directory) as job:
        job.wait_for_steps(args.warmup)
        job.wait_for_shadows()
        first = len(job.steps()[0])
        job.wait_for_steps(args.steps, seconds=600.0)
        ends = [record.end for record in job.steps()[0][first:]]
        times = [b - a for a, b in itertools.pairwise(ends)]
        trainers = {records[-1].pid for records in job.steps()}
        started = [event for event in job.events() if event["event"] == "worker_started" and event["role"] == "shadow"]
        shadows = {event["pid"] for event in started} - trainers
        others = set(job.processes()) - trainers - shadows
        return Sample(
            statistics.median(times),
            statistics.mean(times),
            statistics.mean(memory(pid)[0] for pid in trainers),
            sum(memory(pid)[1] for pid in trainers),
            sum(memory(pid)[1] for pid in shadows),
            sum(memory(pid)[1] for pid in others),
        )


def report(parallel: str, rounds: list[dict[str, Sample]], args: argparse.Namespace) -> None:
    """Medians over the rounds, and the medians of the rounds' ratios."""

    def middle(system: str, field: str) -> float:
        return statistics.median(getattr(r[system], field) for r in rounds)

    rows = [
        [
            system,
            f"{middle(system, 'median') * 1000:.1f}",
            f"{middle(system, 'mean') * 1000:.1f}",
            *(f"{middle(system, f) / MIB:.1f}" for f in ("trainer", "trainers_pss", "shadows_pss", "others_pss")),
        ]
        for system in SCRIPTS
    ]
    header = ["system", "step, median ms", "mean ms", "MiB a trainer", "PSS trainers", "PSS shadows", "PSS rest"]
    print(f"\n{parallel}, {args.size}, {args.ranks} ranks on {os.cpu_count()} cores, {len(rounds)} rounds\n")
    print(table(header, rows))
    for field in ("median", "mean"):
        ratios = sorted(getattr(r["leto"], field) / getattr(r["plain"], field) for r in rounds)
        print(f"step time ({field}) leto / plain: {statistics.median(ratios):.3f}", [round(r, 3) for r in ratios])
    extra = statistics.median(r["leto"].trainer - r["plain"].trainer for r in rounds)
    parameters = sum(p.numel() for p in lm.GPT(lm.SIZES[args.size]).parameters()) * 4
    gradients = parameters / (args.ranks if parallel == "fsdp" else 1)
    allowed = 0.01 * middle("plain", "trainer") + gradients + min(args.chunk_bytes, gradients)
    print(f"a trainer, leto - plain: {extra / MIB:.1f} MiB; 1 % + gradients + one chunk is {allowed / MIB:.1f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", nargs="+", choices=["ddp", "fsdp"], default=["ddp", "fsdp"])
    parser.add_argument("--size", default="small")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150, help="measured steps a job")
    parser.add_argument("--warmup", type=int, default=20, help="steps before")
    parser.add_argument("--chunk-bytes", type=int, default=1 << 20, help="the policy's state.chunk_bytes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        for parallel in args.parallel:
            rounds: list[dict[str, Sample]] = []
            for index in range(args.rounds):
                order = list(SCRIPTS) if index % 2 else list(reversed(SCRIPTS))
                where = Path(work) / f"{parallel}-{index}"
                found = {system: measure(system, parallel, args, where / system) for system in order}
                rounds.append(found)
                print(f"{parallel} round {index + 1}:", {s: f"{x.median * 1000:.1f} ms" for s, x in found.items()})
            report(parallel, rounds, args)


if __name__ == "__main__":
    main()
