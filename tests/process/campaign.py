"""Chaos campaigns: runs of `train.py` under random faults, compared with the undisturbed run. See `scripts/chaos`."""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from leto_elastic.testing import chaosreport
from leto_elastic.testing.chaos import KINDS, Fault, Topology, parse, run_seed, schedule, why_not_survivable, written
from leto_elastic.testing.chaosreport import Result, RunResult
from leto_elastic.testing.cluster import Cluster
from leto_elastic.testing.job import Job, JobError
from leto_elastic.testing.network import Hosts, Network
from leto_elastic.testing.steplog import StepLog, normal_step, stall
from leto_elastic.testing.strikes import Strikes, Struck
from leto_elastic.testing.verdict import Evidence, Outcome, complaints
from tests.process.etcd_server import Server, server
from tests.process.registry import Registry
from tests.process.runs import TRAIN

PACE = 0.06
"""Seconds that a step waits at least, a third of it in each of three phases."""

EVERY = 5
BACK = 3 * EVERY
"""Steps that a loss may cost: a version each `EVERY`, and those that it came late, which a busy machine makes more."""

LEASE = 2
ROOT = Path(__file__).resolve().parents[2]

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the runs of a campaign have in common.

    Args:
        topology: of the jobs.
        parallel: ddp or fsdp.
        steps: of each.
        count: faults of each.
        gap: mean seconds between two of them.
        spares: nodes that stand by from the beginning.
        deadline: seconds that a run may take.
    """

    topology: Topology
    parallel: str = "fsdp"
    steps: int = 200
    count: int = 12
    gap: float = 1.0
    spares: int = 1
    deadline: float = 170.0

    @property
    def args(self) -> tuple[str, ...]:
        """The script's arguments that the outcome depends on."""
        return ("--parallel", self.parallel, "--steps", str(self.steps))

    @property
    def name(self) -> str:
        """For the report."""
        t, kind = self.topology, {"fsdp": "FSDP2", "ddp": "DDP"}[self.parallel]
        if t.nodes == 1:
            return f"1 node of {t.per_node} ranks, {kind}"
        where = ", with links of their own" if t.hosts else ""
        return f"{t.nodes} nodes of {t.per_node} ranks{where}, {kind}, parity {t.parity}"


def policy(plan: Plan, /, **deadlines: float) -> dict[str, Any]:
    """More failures than any real job has must not be the end of it."""
    return {
        "state": {"chunk_bytes": 65536},
        "coordinator": {"lease": LEASE},
        "limits": {"per_step": 1000, "per_window": {"failures": 10000, "seconds": 60}, "per_job": 100000},
        "protect": {"global": {"data": 0, "parity": max(plan.topology.parity, 1), "every": EVERY, "buffers": 1}},
        "deadlines": deadlines,
    }


@contextmanager
def job(
    plan: Plan, directory: Path, /, *, hold: str = "", **deadlines: float
) -> Iterator[tuple[Job | Cluster, Server | None]]:
    """A job of this plan that has been started, and the etcd that it was given."""
    directory.mkdir(parents=True)
    (directory / "policy.yaml").write_text(yaml.safe_dump(policy(plan, **deadlines)))
    (directory / "tmp").mkdir()
    ranks, run_dir, gate = plan.topology.ranks, directory / "run", directory / "gate"
    args = [*plan.args, "--pace", str(PACE), "--gate", str(gate), "--times", "--hold", hold or f"3:{ranks}"]
    env = {"TMPDIR": str(directory / "tmp")}
    conf = {"config": str(directory / "policy.yaml")}
    common: dict[str, Any] = {"run_dir": run_dir, "env": env, "conf": conf, "deadline": plan.deadline, "grace": 10.0}
    if plan.topology.nodes == 1:
        with Job(TRAIN, *args, nproc=ranks, **common) as alone:
            yield alone, None
        return
    with ExitStack() as stack:
        network: Network | None = None
        place = None
        if plan.topology.hosts:
            hosts = stack.enter_context(Hosts(plan.topology.nodes + plan.spares))
            network, place = hosts, hosts.switch
        etcd = stack.enter_context(server(directory / "etcd", place=place))
        nodes, most = plan.topology.nodes, plan.topology.nodes + plan.spares + 2
        cluster = stack.enter_context(
            Cluster(
                TRAIN,
                *args,
                nodes=nodes,
                nproc=plan.topology.per_node,
                nnodes=f"{nodes}:{most}",
                endpoint=etcd.endpoints,
                network=network,
                **common,
            )
        )
        cluster.wait_event("worker_started", role="trainer", count=ranks)  # before a spare could be one of the first
        for _ in range(plan.spares):
            cluster.start_node()
        yield cluster, etcd


def reference(plan: Plan, directory: Path) -> Outcome:
    """The outcome of the undisturbed run, on one node."""
    with Job(
        TRAIN, *plan.args, "--hold", "0:0", run_dir=directory / "run", nproc=plan.topology.ranks, deadline=240
    ) as alone:
        alone.expect_success()
        if alone.recoveries():
            raise alone.error("the undisturbed run was disturbed")
        return outcome(alone, plan.topology.ranks)


def outcome(job: Job | Cluster, ranks: int) -> Outcome:
    """What the ranks printed and noted."""
    paths = {rank: job.run_dir / f"samples.rank{rank}.txt" for rank in range(ranks)}
    samples = {rank: path.read_text().splitlines() for rank, path in paths.items() if path.exists()}
    return Outcome(job.digests(), samples)


def run(
    plan: Plan,
    faults: Sequence[Fault],
    expected: Outcome,
    directory: Path,
    *,
    replay: Callable[[Sequence[Fault]], str] = written,
    say: Say = print,
) -> RunResult:
    """One run under these faults; `replay` makes the line that does it again."""
    began = time.monotonic()
    wrong: list[str] = []
    struck: list[Struck] = []
    log = StepLog(directory / "run", plan.topology.ranks)
    try:
        with job(plan, directory) as (alive, etcd):
            wrong = _disturb(plan, faults, expected, directory, alive, etcd, log, struck, say)
    except JobError as error:
        wrong.append(f"{error}")
    return RunResult(
        topology=plan.name,
        replay=replay(faults[: max((faults.index(s.fault) + 1 for s in struck if s.fault in faults), default=0)]),
        seconds=time.monotonic() - began,
        faults=tuple(results(plan, struck, log, well=not wrong)),
        wrong=tuple(wrong),
    )


def _disturb(
    plan: Plan,
    faults: Sequence[Fault],
    expected: Outcome,
    directory: Path,
    alive: Job | Cluster,
    etcd: Server | None,
    log: StepLog,
    struck: list[Struck],
    say: Say,
) -> list[str]:
    ranks = plan.topology.ranks
    registry = None if etcd is None else Registry(etcd)
    alive.wait_event("shadow_ready", count=ranks)
    strikes = Strikes(alive, plan.topology, faults, etcd=etcd, records=registry, tell=say)
    early = strikes.resources()
    held = [strikes.descriptors()]
    strikes.struck = struck
    strikes.run()
    if not strikes.wait_quiet(45.0):
        strikes.problems.append("45 s after the last fault not every rank has a trainer, and a shadow that is ready")
    late = strikes.resources()
    held.append(strikes.descriptors())
    (directory / "descriptors.json").write_text(json.dumps(held, indent=1))
    (directory / "gate").touch()
    choice = random.Random(written(faults))
    strikes.last(Fault(0.0, "last", choice.randrange(1000), hold=choice.uniform(0.0, 2.0)))
    ended = (
        [i for i, node in enumerate(alive.nodes) if node.hurt and node.ended(0)] if isinstance(alive, Cluster) else []
    )
    if isinstance(alive, Cluster):
        alive.expect_success(dead=ended)
    else:
        alive.expect_success()
    evidence = Evidence(
        steps=plan.steps,
        expected=expected,
        found=outcome(alive, ranks),
        commits=log.commits(),
        struck=struck,
        events=alive.events(),
        back=BACK,
        early=early,
        late=late,
        keys=None if registry is None else registry.keys(),
        run_state="succeeded" if registry is None else registry.run().state,
        files=sorted(path.name for path in (directory / "tmp").iterdir()),
        killed=len(ended),
    )
    return [*strikes.problems, *complaints(evidence)]


def results(plan: Plan, struck: Sequence[Struck], log: StepLog, *, well: bool) -> Iterator[Result]:
    """What became of the faults."""
    commits = log.commits()
    normal = normal_step(commits, [strike.time for strike in struck])
    for strike in struck:
        cost = stall(commits, strike.time, normal)
        yield Result(
            topology=plan.name,
            kind=strike.fault.kind,
            recovered=cost is not None or well,
            stall=None if cost is None else cost.seconds,
            lost_steps=0 if cost is None else cost.lost_steps,
            amid=strike.amid,
        )


# ---- the command


def parser() -> argparse.ArgumentParser:
    """Of `scripts/chaos`."""
    found = argparse.ArgumentParser(prog="scripts/chaos", description=DESCRIPTION)
    found.add_argument("--seed", type=int, default=0, help="of the campaign; each run derives its own")
    found.add_argument("--minutes", type=float, default=10.0, help="no run begins after that")
    found.add_argument("--faults", type=int, help="nor when so many faults have been carried out")
    found.add_argument("--nodes", type=int, default=1)
    found.add_argument("--per-node", type=int, help="ranks of each node; default: 4 on one node, else 1")
    found.add_argument("--parallel", choices=["ddp", "fsdp"], default="fsdp")
    found.add_argument("--parity", type=int, default=1, help="nodes that may be lost at once")
    found.add_argument("--hosts", action="store_true", help="nodes in network namespaces, whose links fail too (root)")
    found.add_argument("--per-run", type=int, default=12, help="faults of one run")
    found.add_argument("--gap", type=float, default=1.0, help="mean seconds between two faults")
    found.add_argument("--kinds", help=f"only these, comma-separated, of: {', '.join(KINDS)}")
    found.add_argument("--run", type=int, help="only the run with this number, from 0")
    found.add_argument("--plan", help="only one run, with these faults, as a replay line has them")
    found.add_argument("--unsurvivable", action="store_true", help="faults that must end the job, clearly")
    found.add_argument("--results", type=Path, help="add all results to this file, for a report on several campaigns")
    found.add_argument("--report", type=Path, help="write the table of all results into this Markdown file")
    found.add_argument("--keep", type=Path, help="directory for the runs; those that are in order are removed")
    return found


DESCRIPTION = (
    "Kills, stops and cuts off parts of small training jobs at random, from outside, and compares each job with the "
    "undisturbed run. Exit code 1 when anything did not hold; the run's directory is kept then, and a line is printed "
    "that does the run again."
)


def plan_of(args: argparse.Namespace) -> Plan:
    """What the options ask for."""
    several = args.nodes > 1
    topology = Topology(
        nodes=args.nodes,
        per_node=args.per_node or (1 if several else 4),
        parity=args.parity if several else 0,
        lease=LEASE,
        hosts=args.hosts,
    )
    steps = 40 + int(args.per_run * args.gap * 8)
    deadline = 120.0 + 10 * args.per_run * (2 if several else 1)
    return Plan(
        topology=topology, parallel=args.parallel, steps=steps, count=args.per_run, gap=args.gap, deadline=deadline
    )


def replay_line(args: argparse.Namespace, index: int, faults: Sequence[Fault]) -> str:
    """The command that does a run again, with the faults up to the last one that was carried out."""
    options = ["--nodes", str(args.nodes), "--parallel", args.parallel, "--per-run", str(args.per_run)]
    options += ["--gap", f"{args.gap:g}", "--parity", str(args.parity), "--seed", str(args.seed), "--run", str(index)]
    options += ["--per-node", str(args.per_node)] if args.per_node else []
    options += ["--hosts"] if args.hosts else []
    return shlex.join(["scripts/chaos", *options, "--plan", written(faults)])


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Exit code 0 when everything held."""
    args = parser().parse_args(argv)
    plan = plan_of(args)
    say: Say = lambda line: print(line, flush=True)  # noqa: E731
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    work = Path(tempfile.mkdtemp(prefix="chaos-")) if args.keep is None else args.keep
    work.mkdir(parents=True, exist_ok=True)
    if args.unsurvivable:
        from tests.process.unsurvivable import campaign

        return campaign(args, plan, work, say)
    say(f"seed {args.seed}: {plan.name}, {plan.steps} steps, {plan.count} faults a run")
    expected = reference(plan, work / "reference")
    end = time.monotonic() + 60 * args.minutes
    done: list[RunResult] = []
    for index in _indices(args, end, done):
        faults = _faults(args, plan, index)
        again = partial(replay_line, args, index)
        say(f"run {index}: {again(faults)}")
        directory = work / f"run{index}"
        result = run(plan, faults, expected, directory, replay=again, say=say)
        done.append(result)
        if args.results is not None:
            chaosreport.append(args.results, result)
        verdict = "WRONG" if result.wrong else "in order"
        say(f"run {index}: {len(result.faults)} faults in {result.seconds:.0f} s: {verdict}")
        if result.wrong:
            for line in result.wrong:
                say(f"  {line}")
            say(f"  kept: {directory}\n  again: {result.replay}")
        else:
            shutil.rmtree(directory)
    if args.report is not None:
        chaosreport.write(args.report, chaosreport.read(args.results) if args.results is not None else done)
    say(f"seed {args.seed}\n\n{chaosreport.table(done)}")
    bad = [result for result in done if result.wrong]
    if not bad:
        shutil.rmtree(work)
    return 1 if bad else 0


def _indices(args: argparse.Namespace, end: float, done: Sequence[RunResult]) -> Iterator[int]:
    if args.run is not None or args.plan is not None:
        yield args.run or 0
        return
    index = 0
    while time.monotonic() < end and sum(len(run.faults) for run in done) < (args.faults or sys.maxsize):
        yield index
        index += 1


def _faults(args: argparse.Namespace, plan: Plan, index: int) -> list[Fault]:
    if args.plan is not None:
        faults = parse(args.plan)
        if reasons := why_not_survivable(faults, plan.topology):
            raise SystemExit("\n".join(reasons))
        return faults
    kinds = None if args.kinds is None else args.kinds.split(",")
    return schedule(run_seed(args.seed, index), plan.topology, count=plan.count, gap=plan.gap, kinds=kinds)
