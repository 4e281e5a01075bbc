"""How long a killed worker stops the job: leto against torchrun with `torch.save` every ten steps, in turns.

    python benchmarks/recovery.py --kills 12

A kill is a SIGKILL from outside at a random instant to a random rank. The stall is the time from the kill to the end of
the first step that began after it on every rank and was finished by every rank, less one median step. It is computed
from the ranks' own step times, in the same way for both systems; the medians of leto's events stand beside it. In leto
jobs a kill waits until every shadow is ready again, in plain jobs until steps have been done after the last recovery.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from jobs import Job, StepRecord, first_step_after, table

SCRIPTS = {"leto": "examples/train_lm.py", "plain": "benchmarks/train_saving.py"}
NAMES = {"leto": "leto_elastic", "plain": "torchrun + torch.save / 10"}


class Kill(NamedTuple):
    """One kill: seconds beyond a normal step, steps done twice, survivors whose process id changed."""

    stall: float
    lost_steps: int
    restarted: int


class Round(NamedTuple):
    """What one job gave: its kills, its median step in seconds, and leto's `recovery` events."""

    kills: list[Kill]
    step: float
    events: list[dict[str, object]]


def normal_step(steps: list[list[StepRecord]], instants: list[float]) -> float:
    """Median time between ends of successive steps of rank 0 in one process, kills left out."""
    times = [
        b.end - a.end
        for a, b in itertools.pairwise(steps[0])
        if b.step == a.step + 1 and a.pid == b.pid and not any(a.begin < t < b.end for t in instants)
    ]
    return statistics.median(times)


def run_round(system: str, kills: int, args: argparse.Namespace, directory: Path, rng: random.Random) -> Round:
    """One job with `kills` kills."""
    options = [f"--parallel={args.parallel}", f"--size={args.size}", "--steps=1000000"]
    found: list[tuple[float, float, int, int]] = []
    with Job(system, SCRIPTS[system], options, args.ranks, directory) as job:
        job.wait_for_steps(12)
        for _ in range(kills):
            job.wait_for_shadows()
            job.wait_for_steps(3)
            time.sleep(rng.uniform(0.0, 2.0))
            victim = rng.randrange(args.ranks)
            before = [records[-1].pid for records in job.steps()]
            instant = time.monotonic()
            os.kill(before[victim], signal.SIGKILL)
            step, end = job.wait_for("step after a kill", lambda t=instant: first_step_after(job.steps(), t), 120)
            done = min(max(r.step for r in records if r.end < instant) for records in job.steps())
            after = [records[-1].pid for records in job.steps()]
            restarted = sum(before[rank] != after[rank] for rank in range(args.ranks) if rank != victim)
            found.append((instant, end, max(0, done + 1 - step), restarted))
            print(f"  {system}: rank {victim} killed, next step after {end - instant:.3f} s", flush=True)
        step_time = normal_step(job.steps(), [instant for instant, *_ in found])
        events = [event for event in job.events() if event["event"] == "recovery"]
    kill_list = [Kill(end - instant - step_time, lost, restarted) for instant, end, lost, restarted in found]
    return Round(kill_list, step_time, events)


def summary(system: str, rounds: list[Round]) -> list[str]:
    """One row of the table."""
    stalls = sorted(kill.stall for r in rounds for kill in r.kills)
    lost = [kill.lost_steps for r in rounds for kill in r.kills]
    restarted = sum(kill.restarted for r in rounds for kill in r.kills)
    step = statistics.median(r.step for r in rounds)
    p95 = statistics.quantiles(stalls, n=20, method="inclusive")[-1] if len(stalls) > 1 else stalls[0]
    return [
        NAMES[system],
        str(len(stalls)),
        f"{statistics.median(stalls) * 1000:.0f}",
        f"{p95 * 1000:.0f}",
        f"{statistics.mean(lost):.1f} ({max(lost)})",
        str(restarted),
        f"{step * 1000:.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12, help="per system, over all rounds")
    parser.add_argument("--rounds", type=int, default=2, help="jobs per system, in turns")
    parser.add_argument("--systems", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS))
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp", help="plain jobs know ddp only")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write every kill there")
    args = parser.parse_args()
    if args.parallel == "fsdp" and "plain" in args.systems:
        parser.error("the plain baseline is DDP: choose --systems leto for fsdp")

    rng = random.Random(args.seed)
    results: dict[str, list[Round]] = {system: [] for system in args.systems}
    with tempfile.TemporaryDirectory() as work:
        for index in range(args.rounds):
            for system in args.systems:
                kills = args.kills * (index + 1) // args.rounds - args.kills * index // args.rounds
                print(f"round {index + 1}/{args.rounds}: {NAMES[system]}, {kills} kills", flush=True)
                results[system].append(run_round(system, kills, args, Path(work) / f"{index}-{system}", rng))

    header = [
        "system",
        "kills",
        "stall, median ms",
        "p95 ms",
        "lost steps, mean (max)",
        "survivors restarted",
        "step ms",
    ]
    print(f"\n{args.parallel}, {args.size}, {args.ranks} ranks on {os.cpu_count()} cores\n")
    print(table(header, [summary(system, rounds) for system, rounds in results.items()]))
    if len(results) == 2:
        medians = {s: statistics.median(k.stall for r in rounds for k in r.kills) for s, rounds in results.items()}
        print(f"\nplain / leto: {medians['plain'] / medians['leto']:.0f} times")
    events = [event for r in results.get("leto", []) for event in r.events]
    if events:
        phases = events[0]["phases_ms"]
        assert isinstance(phases, dict)
        own = {name: statistics.median(e["phases_ms"].get(name, 0.0) for e in events) for name in phases}  # type: ignore[attr-defined]
        stall = statistics.median(e["stall_ms"] for e in events)  # type: ignore[type-var]
        print(f"leto's events: median stall_ms {stall:.0f} (the first step included), phases", end=" ")
        print(", ".join(f"{name} {value:.1f}" for name, value in own.items()))
    if args.json:
        kills_of = {s: [kill._asdict() for r in rounds for kill in r.kills] for s, rounds in results.items()}
        args.json.write_text(json.dumps(kills_of, indent=1))


if __name__ == "__main__":
    main()
