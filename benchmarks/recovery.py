"""How long a kill stops the job: leto against torchrun with a checkpoint every ten steps, in turns.

    python benchmarks/recovery.py --kills 12
    python benchmarks/recovery.py --nodes 4 --size small --parallel fsdp --kills 12

A kill is a SIGKILL from outside at a random instant to a random rank, or with `--nodes` to all processes of a random
node, with a spare node standing by; then torchrun uses c10d and `torch.distributed.checkpoint`. The stall is the time
from the kill to the end of the first step that began after it on every rank and was finished by every rank, less one
median step. "To progress" is until a step is finished that no rank had finished before. Both are computed from the
ranks' own step times, in the same way for both systems; the medians of leto's events stand beside it. In leto jobs a
kill waits until every shadow is ready again, and protection is complete; in plain jobs until steps have been done after
the last recovery, and a spare waits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from jobs import Job, StepRecord, Training, first_step_after, table
from nodes import Nodes

LETO = "examples/train_lm.py"
PLAIN = {"rank": "benchmarks/train_saving.py", "node": "benchmarks/train_dcp.py"}
NAMES = {"leto": "leto_elastic", "plain": "torchrun + checkpoint / 10"}


class Kill(NamedTuple):
    """One kill: seconds beyond a normal step, the same until new work, steps done twice, survivors with another pid.

    `leader`: the node that led a leto job of several was hit.
    """

    stall: float
    progress: float
    lost_steps: int
    restarted: int
    leader: bool


class Round(NamedTuple):
    """What one job gave: its kills, its median step in seconds, and leto's events of them, a list a kill."""

    kills: list[Kill]
    step: float
    events: list[list[dict[str, Any]]]


def open_job(system: str, args: argparse.Namespace, directory: Path) -> Training:
    """The job of a round; a context manager."""
    options = [f"--parallel={args.parallel}", f"--size={args.size}", "--steps=1000000"]
    script = LETO if system == "leto" else PLAIN["node" if args.nodes else "rank"]
    if not args.nodes:
        return Job(system, script, options, args.ranks, directory)
    policy = {
        "protect": {"global": {"every": args.every, "buffers": args.buffers}},
        "coordinator": {"lease": args.lease},
    }
    conf = dict(pair.split("=") for pair in args.rdzv_conf.split(",") if pair)
    return Nodes(
        system, script, options, directory, nodes=args.nodes, ranks=args.per_node, policy=policy, conf=conf, spares=1
    )


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
    found: list[tuple[float, float, float, int, int, bool]] = []
    marks: list[float] = []
    with open_job(system, args, directory) as job:
        job.wait_for_steps(12)
        for _ in range(kills):
            job.settle()
            job.wait_for_steps(args.pause)
            time.sleep(rng.uniform(0.0, 2.0))
            before = job.trainers()
            marks.append(time.time())
            instant, hit = job.strike(rng)
            step, end = job.wait_for("step after a kill", lambda t=instant: first_step_after(job.steps(), t), 300)
            done = min(max(r.step for r in records if r.end < instant) for records in job.steps())
            beyond = job.wait_for(
                "new step", lambda t=instant, d=done: first_step_after(job.steps(), t, beyond=d), seconds=300
            )[1]
            after = job.trainers()
            restarted = sum(before[rank] != after[rank] for rank in set(range(job.ranks)) - hit)
            leader = isinstance(job, Nodes) and job.leader_hit
            found.append((instant, end, beyond, max(0, done + 1 - step), restarted, leader))
            print(
                f"  {system}: ranks {sorted(hit)}{' of the leader' if leader else ''} killed, next step after "
                f"{end - instant:.3f} s, {max(0, done + 1 - step)} steps lost, new ones after {beyond - instant:.3f} s",
                flush=True,
            )
        step_time = normal_step(job.steps(), [instant for instant, *_ in found])
        events = job.events()
    told = [
        [event for event in events if begin <= event["time"] < end and event["event"] in ("recovery", "restored")]
        for begin, end in itertools.pairwise([*marks, float("inf")])
    ]
    kill_list = [
        Kill(end - instant - step_time, beyond - instant - step_time, lost, restarted, leader)
        for instant, end, beyond, lost, restarted, leader in found
    ]
    return Round(kill_list, step_time, told)


def p95(values: list[float]) -> float:
    """95 % of the values are below; of a few it is near the largest."""
    return statistics.quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


def summary(system: str, rounds: list[Round]) -> list[str]:
    """One row of the table."""
    kills = [kill for r in rounds for kill in r.kills]
    lost = [kill.lost_steps for kill in kills]
    row = [NAMES[system], str(len(kills))]
    for times in ([kill.stall for kill in kills], [kill.progress for kill in kills]):
        row += [f"{statistics.median(times) * 1000:.0f}", f"{p95(times) * 1000:.0f}"]
    row += [f"{statistics.mean(lost):.1f} ({max(lost)})", str(sum(kill.restarted for kill in kills))]
    return [*row, f"{statistics.median(r.step for r in rounds) * 1000:.0f}"]


def own_account(kills: list[list[dict[str, Any]]]) -> str:
    """Medians of what leto's events say, of every kill the longest that a node tells."""
    recoveries = [[event for event in events if event["event"] == "recovery"] for events in kills]
    recoveries = [events for events in recoveries if events]
    if not recoveries:
        return "leto's events tell of no recovery"
    stall = statistics.median(max(e["stall_ms"] for e in events) for events in recoveries)
    lost = [max(e["lost_steps"] for e in events) for events in recoveries]
    parts = [
        f"{name} {statistics.median(max(e['phases_ms'].get(name, 0.0) for e in events) for events in recoveries):.1f}"
        for name in recoveries[0][0]["phases_ms"]
    ]
    restored = [event["seconds"] * 1000 for events in kills for event in events if event["event"] == "restored"]
    more = f"; restored in {statistics.median(restored):.1f}" if restored else ""
    return (
        f"leto's events: median stall_ms {stall:.0f} (the first step included), lost steps {statistics.mean(lost):.1f} "
        f"({max(lost)}), phases {', '.join(parts)}{more}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12, help="per system, over all rounds")
    parser.add_argument("--rounds", type=int, default=2, help="jobs per system, in turns")
    parser.add_argument("--systems", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument(
        "--parallel", choices=["ddp", "fsdp"], default="ddp", help="plain jobs on one node know ddp only"
    )
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--ranks", type=int, default=4, help="of a job of one node")
    parser.add_argument("--nodes", type=int, default=0, help="nodes to train on; 0: one, of which ranks are killed")
    parser.add_argument("--per-node", type=int, default=1, help="ranks of each of the nodes")
    parser.add_argument("--every", type=int, default=10, help="protect.global.every")
    parser.add_argument("--buffers", type=int, default=1, help="protect.global.buffers")
    parser.add_argument("--lease", type=int, default=5, help="coordinator.lease")
    parser.add_argument("--rdzv-conf", default="", help="more of plain torchrun's, such as keep_alive_interval=1")
    parser.add_argument("--pause", type=int, default=3, help="steps at least between being settled and a kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write every kill there")
    args = parser.parse_args()
    if args.parallel == "fsdp" and "plain" in args.systems and not args.nodes:
        parser.error("the plain baseline on one node is DDP: choose --systems leto for fsdp")

    rng = random.Random(args.seed)
    results: dict[str, list[Round]] = {system: [] for system in args.systems}
    with tempfile.TemporaryDirectory() as work:
        for index in range(args.rounds):
            for system in args.systems:
                kills = args.kills * (index + 1) // args.rounds - args.kills * index // args.rounds
                print(f"round {index + 1}/{args.rounds}: {NAMES[system]}, {kills} kills", flush=True)
                results[system].append(run_round(system, kills, args, Path(work) / f"{index}-{system}", rng))

    header = ["system", "kills", "stall, median ms", "p95 ms", "to progress, median ms", "p95 ms"]
    header += ["lost steps, mean (max)", "survivors restarted", "step ms"]
    where = f"{args.nodes} nodes of {args.per_node} ranks and a spare" if args.nodes else f"{args.ranks} ranks"
    print(f"\n{args.parallel}, {args.size}, {where} on {os.cpu_count()} cores\n")
    print(table(header, [summary(system, rounds) for system, rounds in results.items()]))
    if len(results) == 2:
        medians = {s: statistics.median(k.stall for r in rounds for k in r.kills) for s, rounds in results.items()}
        print(f"\nplain / leto: {medians['plain'] / medians['leto']:.1f} times")
    if "leto" in results:
        print(own_account([events for r in results["leto"] for events in r.events]))
    if args.json:
        kills_of = {
            system: [kill._asdict() | {"events": events} for r in rounds for kill, events in zip(*r[::2], strict=True)]
            for system, rounds in results.items()
        }
        args.json.write_text(json.dumps(kills_of, indent=1))


if __name__ == "__main__":
    main()
