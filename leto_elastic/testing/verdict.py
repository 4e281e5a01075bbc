"""What must hold after a run with faults: pure functions of what the run left, each the list of what is wrong.

They quote the design's invariants: survivors keep their processes, the outcome equals the undisturbed run's bit by bit,
step numbers are monotone and each sample is used once per committed step, nothing is left behind, nothing grows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from leto_elastic.testing.processes import Resources
from leto_elastic.testing.steplog import Commits
from leto_elastic.testing.strikes import Struck
from leto_elastic.testing.watching import Digest, Event

_DESCRIPTORS = 6
_THREADS = 6
_LATE = 0.5
"""Seconds after which a killed process certainly commits nothing more."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What must be equal to that of the undisturbed run: digests and sample lines by rank."""

    digests: Mapping[int, Digest]
    samples: Mapping[int, Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a run has left.

    Args:
        steps: that it had to do.
        expected: outcome of the undisturbed run.
        found: its outcome.
        commits: of each rank.
        struck: the faults.
        events: of all nodes, by time.
        back: steps that the loss of a node may set the job back.
        early, late: what the agents held before the first fault and after the last, by node.
        keys: in etcd after the end, below the run's root; None where etcd ended with the job.
        run_state: as etcd tells it, if it does.
        files: left in the directory for temporary files.
        killed: agents that were killed.
    """

    steps: int
    expected: Outcome
    found: Outcome
    commits: Commits
    struck: Sequence[Struck]
    events: Sequence[Event]
    back: int = 0
    early: Mapping[int, Resources] = field(default_factory=dict)
    late: Mapping[int, Resources] = field(default_factory=dict)
    keys: Sequence[str] | None = None
    run_state: str = "succeeded"
    files: Sequence[str] = ()
    killed: int = 0


def complaints(evidence: Evidence) -> list[str]:
    """All that is wrong; empty when everything holds."""
    return [
        *outcome(evidence.expected, evidence.found, evidence.steps),
        *survivors(evidence.commits, evidence.struck),
        *monotone(evidence.commits, evidence.struck, evidence.steps, evidence.back),
        *lost_steps(evidence.events, evidence.struck, evidence.back),
        *growth(evidence.early, evidence.late),
        *records(evidence.keys, evidence.run_state),
        *left_files(evidence.files, evidence.killed),
    ]


def outcome(expected: Outcome, found: Outcome, steps: int) -> list[str]:
    """Bit-identical, and each sample once per committed step."""
    wrong: list[str] = []
    if found.digests.keys() != expected.digests.keys():
        wrong.append(f"digests of ranks {sorted(found.digests)} instead of {sorted(expected.digests)}")
    for rank in sorted(found.digests.keys() & expected.digests.keys()):
        if found.digests[rank] != expected.digests[rank]:
            wrong.append(f"rank {rank}: digest {found.digests[rank]} instead of {expected.digests[rank]}")
    for rank, lines in sorted(expected.samples.items()):
        mine = list(found.samples.get(rank, []))
        if [line.split()[0] for line in mine] != [str(step) for step in range(steps)]:
            wrong.append(f"rank {rank}: the steps in its samples are not 0 to {steps - 1}, each once")
        elif mine != list(lines):
            step = next(step for step, (a, b) in enumerate(zip(mine, lines, strict=True)) if a != b)
            wrong.append(f"rank {rank}: step {step} used {mine[step]!r} instead of {lines[step]!r}")
    return wrong


def survivors(commits: Commits, struck: Sequence[Struck]) -> list[str]:
    """A rank goes on in another process only if the one before was hit, and in none that was killed.

    A shadow that is hit may be the trainer already, when no event has told it yet.
    """
    wrong: list[str] = []
    hit: set[int] = set()
    for strike in struck:
        if strike.fault.kind not in ("stop", "agent_stop", "link"):
            hit |= strike.pids
    for rank, found in sorted(commits.items()):
        wrong += [
            f"rank {rank}: process {before.pid} was replaced by {after.pid} at step {after.step}, and nobody hit it"
            for before, after in pairwise(found)
            if before.pid != after.pid and before.pid not in hit
        ]
    killed = {
        pid: s.time for s in struck if s.fault.kind in ("kill", "several", "both", "node", "last") for pid in s.pids
    }
    return wrong + [
        f"rank {rank}: process {commit.pid} committed step {commit.step} after it was killed"
        for rank, found in sorted(commits.items())
        for commit in found
        if commit.time > killed.get(commit.pid, float("inf")) + _LATE
    ]


def monotone(commits: Commits, struck: Sequence[Struck], steps: int, back: int) -> list[str]:
    """Each step follows the one before it; after the loss of a node the job may go back by `back` steps.

    A step is noted shortly before it is committed, so after any other fault the last one may be there twice.
    """
    wrong: list[str] = []
    for rank, found in sorted(commits.items()):
        for before, after in pairwise(found):
            ahead = after.step - before.step
            earlier = [strike for strike in struck if strike.time < after.time]
            if ahead > 1:
                wrong.append(f"rank {rank}: step {before.step} was followed by step {after.step}")
            elif ahead == 0 and not earlier:
                wrong.append(f"rank {rank}: step {after.step} was done twice without a fault")
            elif ahead < 0 and not any(strike.loss for strike in earlier):
                wrong.append(f"rank {rank}: went back from step {before.step} to {after.step}, and no node was lost")
            elif ahead < -back:
                wrong.append(f"rank {rank}: went back from step {before.step} to {after.step}, allowed are {back}")
        if not found or found[-1].step != steps - 1:
            wrong.append(f"rank {rank}: the last step is {found[-1].step if found else None} instead of {steps - 1}")
    return wrong


def lost_steps(events: Sequence[Event], struck: Sequence[Struck], back: int) -> list[str]:
    """A process failure loses no step; the loss of a node at most `back`."""
    limit = back if any(strike.loss for strike in struck) else 0
    return [
        f"the recovery of epoch {event['epoch']} lost {event['lost_steps']} steps, allowed are {limit}"
        for event in events
        if event["event"] == "recovery" and not 0 <= int(str(event["lost_steps"])) <= limit
    ]


def growth(early: Mapping[int, Resources], late: Mapping[int, Resources]) -> list[str]:
    """Of the descriptors and threads of agents; a few are allowed for what may be open.

    Compared with the agent that had most at first, because whoever leads serves the others, and another one may lead.
    """
    if not early:
        return []
    fds, threads = max(found.fds for found in early.values()), max(found.threads for found in early.values())
    wrong: list[str] = []
    for index, now in sorted(late.items()):
        if now.fds > fds + _DESCRIPTORS:
            wrong.append(f"agents had up to {fds} descriptors at first, and that of node {index} {now.fds} at last")
        if now.threads > threads + _THREADS:
            wrong.append(f"agents had up to {threads} threads at first, and that of node {index} {now.threads} at last")
    return wrong


def records(keys: Sequence[str] | None, state: str) -> list[str]:
    """etcd says that the run succeeded, and of nobody that it still takes part in it."""
    if keys is None:
        return []
    wrong = [] if state == "succeeded" else [f"etcd says that the run is {state}"]
    if present := [key for key in keys if key.startswith("nodes/") or key == "leader"]:
        wrong.append(f"etcd still has {', '.join(present)} after the end")
    plans = [int(key.split("/")[1]) for key in keys if key.startswith("plans/")]
    if sorted(plans) != list(range(1, len(plans) + 1)):
        wrong.append(f"the plans in etcd are those of epochs {sorted(plans)}")
    failures = {int(key.split("/")[1]) for key in keys if key.startswith("failures/")}
    if beyond := {epoch for epoch in failures if epoch > max(plans, default=0)}:
        wrong.append(f"etcd has failures of epochs {sorted(beyond)} that there was no plan for")
    return wrong


def left_files(files: Sequence[str], killed: int) -> list[str]:
    """An agent that was killed leaves its socket's directory; nobody else leaves anything."""
    sockets = [name for name in files if name.startswith("leto-")]
    if len(sockets) > killed:
        return [f"{len(sockets)} directories are left, {killed} agents were killed: {', '.join(sockets)}"]
    return []
