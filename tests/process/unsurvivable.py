"""Chaos that no job can survive: it must end the job everywhere, within its limits, with a reason and no result."""

from __future__ import annotations

import argparse
import random
import signal
import time
from pathlib import Path
from typing import NamedTuple

from leto_elastic.testing.cluster import Cluster
from leto_elastic.testing.job import Job, JobError
from leto_elastic.testing.strikes import Strikes
from leto_elastic.testing.verdict import Outcome
from tests.process.campaign import Plan, Say, job, outcome, reference
from tests.process.registry import Registry

CASES = ("early", "too_many", "no_spare")
MEANING = {
    "early": "a trainer is killed before every rank has committed its first step",
    "too_many": "one node more than the parity covers is killed at once",
    "no_spare": "a node is killed, and none comes in its place within deadlines.replace",
}
WAITS = {"replace": 5.0}
LIMIT = 40.0
"""Seconds from the fault to the end of all agents; the waits that lead there are `WAITS`."""


class Ending(NamedTuple):
    """How a case went: seconds from the fault to the end of the job, and what was wrong."""

    case: str
    seconds: float
    wrong: list[str]


def possible(plan: Plan) -> list[str]:
    """The cases that this topology has."""
    return [case for case in CASES if case == "early" or plan.topology.nodes > plan.topology.parity + 1]


def end_of(case: str, plan: Plan, expected: Outcome, directory: Path, rng: random.Random, say: Say) -> Ending:
    """Let a case happen to a job at a random moment."""
    early = case == "early"
    spares = 0 if case == "no_spare" else plan.spares
    plan = Plan(topology=plan.topology, parallel=plan.parallel, steps=plan.steps, spares=spares, deadline=plan.deadline)
    hold = f"0:{10**6}" if early else ""  # nobody commits anything then
    seconds, wrong, codes = 0.0, [], []
    try:
        with job(plan, directory, hold=hold, **WAITS) as (alive, etcd):
            ranks = plan.topology.ranks
            if early:
                alive.wait_event("worker_started", role="trainer", count=ranks)
            else:
                alive.wait_event("shadow_ready", count=ranks)
            if etcd is not None and case in ("too_many", "no_spare"):
                registry = Registry(etcd)
                look = lambda: registry.protected(ranks)[0] >= 0 or None  # noqa: E731
                alive.wait_for(look, lambda: "complete protection", every=0.3)
            moment = time.monotonic() + rng.uniform(0.0, 2.0)
            alive.wait_for(lambda: time.monotonic() >= moment or None, lambda: "the moment", every=0.01)
            begun = time.monotonic()
            codes = _strike(case, alive, plan, rng, say)
            seconds = time.monotonic() - begun
            found = outcome(alive, ranks)
            if etcd is not None and (run := Registry(etcd).run()).state != "failed":
                wrong.append(f"etcd says that the run is {run.state}")
            elif etcd is not None and not run.reason:
                wrong.append("etcd has no reason for the end of the run")
            said = alive.output() if isinstance(alive, Job) else "".join(node.output() for node in alive.nodes)
            if "leto: the job ends: " not in said and "leto: " not in said:
                wrong.append("nobody said why the job ended")
    except JobError as error:
        return Ending(case, seconds, [*wrong, str(error)])
    if 0 in codes:
        wrong.append(f"exit codes {codes}")
    if seconds > LIMIT:
        wrong.append(f"the job ended {seconds:.1f} s after the fault, allowed are {LIMIT:g}")
    if found.digests:
        wrong.append(f"ranks {sorted(found.digests)} printed a result")
    for rank, lines in found.samples.items():
        if list(lines) != list(expected.samples[rank])[: len(lines)]:
            wrong.append(f"rank {rank}: its samples are not those of the undisturbed run")
    return Ending(case, seconds, wrong)


def _strike(case: str, alive: Job | Cluster, plan: Plan, rng: random.Random, say: Say) -> list[int]:
    """The exit codes of the agents that were not killed."""
    if case == "early":
        there = Strikes(alive, plan.topology, []).census()
        pids = sorted(there.trainers.values())
        say(f"  SIGKILL to one of {pids}")
        alive.kill(rng.choice(pids), signal.SIGKILL)
        if isinstance(alive, Job):
            return [alive.wait()]
        alive.expect_failure()
        return [node.wait() for node in alive.nodes]
    assert isinstance(alive, Cluster)
    members = Strikes(alive, plan.topology, []).census().members()
    count = plan.topology.parity + 1 if case == "too_many" else 1
    dead = rng.sample(members, count)
    say(f"  SIGKILL to all of nodes {dead}")
    for index in dead:
        alive.nodes[index].kill_all()
    alive.expect_failure(dead=dead)
    return [node.wait() for index, node in enumerate(alive.nodes) if index not in dead]


def campaign(args: argparse.Namespace, plan: Plan, work: Path, say: Say) -> int:
    """`scripts/chaos --unsurvivable`. Exit code 0 when every job ended as it should."""
    expected = reference(plan, work / "reference")
    end = time.monotonic() + 60 * args.minutes
    endings: list[Ending] = []
    index = args.run or 0
    while time.monotonic() < end and len(endings) < (args.faults or 10**6):
        rng = random.Random(f"unsurvivable {args.seed}/{index}")
        case = rng.choice(possible(plan))
        say(f"run {index}: {MEANING[case]}")
        ending = end_of(case, plan, expected, work / f"run{index}", rng, say)
        say(f"run {index}: ended after {ending.seconds:.1f} s: {'; '.join(ending.wrong) or 'as it should'}")
        if ending.wrong:
            say(f"  kept: {work / f'run{index}'}; again: --unsurvivable --seed {args.seed} --run {index} --faults 1")
        endings.append(ending)
        index += 1
    for case in CASES:
        mine = [ending for ending in endings if ending.case == case]
        if mine:
            bad = sum(bool(ending.wrong) for ending in mine)
            longest = max(ending.seconds for ending in mine)
            say(f"| {MEANING[case]} | {len(mine)} | ended clearly: {len(mine) - bad} | at the latest {longest:.1f} s |")
    return 1 if any(ending.wrong for ending in endings) else 0
