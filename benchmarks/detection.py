"""How soon a failure is known everywhere: from the fault to the abort in the last rank. And what watching costs.

    python benchmarks/detection.py --rounds 20
    python benchmarks/detection.py --cost

Faults come from outside at a random instant to a random rank: `exit` is a SIGKILL, `stop` a SIGSTOP, `hang` a rank that
sleeps for ever in its body. Each waits until all shadows are ready again. The abort in a rank is when its communicators
of the old epoch are ended, told by the rank itself. For `stop` what is beyond `hang.heartbeat` is given, counted from
the signal; for `hang` what is beyond the learned limit, counted from the begin of the sleep. `nodes` is `exit` in a job
of two agents on the loopback interface, with etcd beside it.

The cost is taken in one run, in which all ranks switch their signs of life off and on every few steps: blocks with and
without are compared in pairs. What the agent spends comes from its processor time.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import yaml

from jobs import ROOT, table

sys.path.insert(0, str(ROOT))

from leto_elastic.testing.cluster import Cluster
from leto_elastic.testing.job import Job
from tests.process.etcd_server import server

import signal  # isort: skip

SCRIPT = ROOT / "benchmarks" / "train_watched.py"
HANG = {"factor": 10, "min": 1, "first": 120, "pause": 120, "heartbeat": 1}
LIFE = 3600.0


def start(kind: str, args: argparse.Namespace, directory: Path, stack: ExitStack, *options: str) -> Job | Cluster:
    """A job for faults of this kind."""
    policy = directory / "policy.yaml"
    limits = {"per_step": 100, "per_window": {"failures": 1000, "seconds": 60}}
    policy.write_text(yaml.safe_dump({"hang": HANG, "limits": limits}))
    conf = {"config": str(policy)}
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}", "OMP_NUM_THREADS": "1"}
    run_dir = directory / "run"
    if kind != "nodes":
        job = Job(SCRIPT, *options, run_dir=run_dir, nproc=args.ranks, conf=conf, env=env, deadline=LIFE)
        return stack.enter_context(job)
    etcd = stack.enter_context(server(directory / "etcd"))
    cluster = Cluster(
        SCRIPT, *options, run_dir=run_dir, endpoint=etcd.endpoints, nodes=2, nproc=args.ranks // 2, conf=conf, env=env,
        deadline=LIFE,
    )  # fmt: skip
    return stack.enter_context(cluster)


def lines(path: Path) -> list[list[float]]:
    """Whole lines of numbers."""
    if not path.exists():
        return []
    text = path.read_text()
    return [[float(word) for word in line.split()] for line in text[: text.rfind("\n") + 1].splitlines()]


def until(what: str, look: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait for something."""
    end = time.monotonic() + seconds
    while not look():
        if time.monotonic() > end:
            raise RuntimeError(f"no {what} within {seconds:g} s")
        time.sleep(0.02)


def strike(kind: str, job: Job | Cluster, rank: int, run_dir: Path) -> float:
    """Do it; when that was."""
    if kind == "hang":
        asleep = run_dir / f"asleep.{rank}"
        asleep.unlink(missing_ok=True)
        (run_dir / f"sleep.{rank}").touch()
        until("sleep", lambda: lines(asleep))
        return lines(asleep)[0][0]
    pid = job.pid_of(rank)
    instant = time.monotonic()
    os.kill(pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
    return instant


def detect(kind: str, args: argparse.Namespace, rng: random.Random) -> list[float]:
    """Seconds of each fault of this kind, beyond the limit where there is one."""
    found = []
    with tempfile.TemporaryDirectory() as work, ExitStack() as stack:
        directory = Path(work)
        job = start(kind, args, directory, stack)
        run_dir = directory / "run"
        for number in range(args.rounds):
            job.wait_event("shadow_ready", count=args.ranks + number)
            begun = [len(lines(run_dir / f"steps.{rank}")) for rank in range(args.ranks)]
            until(
                "steps",
                lambda begun=begun: all(len(lines(run_dir / f"steps.{r}")) > n + 25 for r, n in enumerate(begun)),
            )
            time.sleep(rng.uniform(0.0, 0.2))
            victim = rng.randrange(args.ranks)
            fault = strike(kind, job, victim, run_dir)
            others = [rank for rank in range(args.ranks) if rank != victim]

            def ends(fault: float = fault, others: list[int] = others) -> list[float]:
                told = [[t for _, t in lines(run_dir / f"aborts.{rank}") if t > fault] for rank in others]
                return [instants[0] for instants in told if instants]

            until("abort", lambda ends=ends, others=others: len(ends()) == len(others))
            took = max(ends()) - fault
            if kind == "stop":
                took -= HANG["heartbeat"]
            if kind == "hang":
                took -= float(str([event for event in job.events() if event["event"] == "hang"][-1]["limit"]))
            found.append(took)
            print(f"  {kind}: rank {victim}, {took * 1000:.1f} ms", flush=True)
    return found


def processor_time(pid: int) -> float:
    """Seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cost(args: argparse.Namespace) -> None:
    """What signs of life cost a step, and the agent."""
    with tempfile.TemporaryDirectory() as work, ExitStack() as stack:
        directory = Path(work)
        steps = 2 * args.block * args.pairs
        job = start("cost", args, directory, stack, f"--toggle={args.block}", f"--steps={steps}", f"--size={args.size}")
        assert isinstance(job, Job)
        job.wait_event("shadow_ready", count=args.ranks)
        skipped = len(lines(directory / "run" / "times.0"))
        began, used = time.monotonic(), processor_time(job.pid)
        until("steps", lambda: len(lines(directory / "run" / "times.0")) >= steps - 2, 3000.0)
        share = (processor_time(job.pid) - used) / (time.monotonic() - began)
        job.expect_success()
        times = [lines(directory / "run" / f"times.{rank}") for rank in range(args.ranks)]
    first = -(-skipped // (2 * args.block)) * 2 * args.block
    blocks = [rows[i : i + args.block] for rows in times for i in range(first, steps, args.block)]
    for name, column in (("wall", 1), ("processor", 2)):
        means = [(block[0][0], statistics.fmean(row[column] for row in block[1:])) for block in blocks]
        ratios = [a[1] / b[1] for a, b in zip(means[::2], means[1::2], strict=True) if a[0] and not b[0]]
        middle = statistics.median(ratios)
        spread = statistics.stdev(ratios) / len(ratios) ** 0.5
        step = statistics.median(mean for _, mean in means) * 1000
        print(
            f"{name} time of a step, with / without: {middle:.4f} (± {spread:.4f}, {len(ratios)} pairs; {step:.1f} ms)"
        )
    print(f"the agent used {share * 100:.2f} % of a core, half of the time with trainers to look at")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=["exit", "nodes", "stop", "hang"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cost", action="store_true", help="measure the cost instead")
    parser.add_argument("--size", default="tiny", help="of the model, for the cost")
    parser.add_argument("--block", type=int, default=25, help="steps between two switches, for the cost")
    parser.add_argument("--pairs", type=int, default=20, help="blocks with and blocks without, for the cost")
    args = parser.parse_args()
    if args.cost:
        cost(args)
        return
    rng = random.Random(args.seed)
    rows = []
    for kind in args.kinds or ["exit", "nodes", "stop", "hang"]:
        found = [seconds * 1000 for seconds in detect(kind, args, rng)]
        rows.append([kind, str(len(found)), f"{statistics.median(found):.1f}", f"{max(found):.1f}"])
    print(f"\n{args.ranks} ranks on {os.cpu_count()} cores\n")
    print(table(["fault", "rounds", "median ms", "worst ms"], rows))


if __name__ == "__main__":
    main()
