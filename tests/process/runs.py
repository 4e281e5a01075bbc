"""Runs of `train.py` compared with the undisturbed run of the same arguments."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from leto_elastic.testing.cluster import Cluster
from leto_elastic.testing.job import Digest, Job

TRAIN = Path(__file__).with_name("train.py")
POLICY = Path(__file__).with_name("policy.yaml")

Reference = Callable[..., "Outcome"]


class Outcome:
    """What must be equal: the digests and the sample lines of all ranks."""

    def __init__(self, job: Job | Cluster, steps: int, world_size: int = 4) -> None:
        self.digests: dict[int, Digest] = job.digests()
        ranks = sorted(self.digests)
        self.samples = {rank: (job.run_dir / f"samples.rank{rank}.txt").read_text().splitlines() for rank in ranks}
        assert ranks == list(range(world_size))
        for lines in self.samples.values():
            assert [int(line.split()[0]) for line in lines] == list(range(steps))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outcome) and (self.digests, self.samples) == (other.digests, other.samples)

    __hash__ = None  # type: ignore[assignment]


def train(
    run_dir: Path,
    *args: str,
    nproc: int = 4,
    faults: str = "",
    deadline: float = 90.0,
    config: Path | None = POLICY,
) -> Job:
    """A job of one node with small chunks, so that an update has several."""
    conf = {"config": str(config)} if config is not None else {}
    return Job(TRAIN, *args, run_dir=run_dir, nproc=nproc, faults=faults, conf=conf, deadline=deadline)


def trainers(job: Job | Cluster, world_size: int = 4) -> dict[int, int]:
    """Rank to pid of the first trainers."""
    started = [e for e in job.events() if e["event"] == "worker_started" and e["role"] == "trainer"]
    return {int(str(e["rank"])): int(str(e["pid"])) for e in started[:world_size]}


def wait_stopped(job: Job | Cluster, pid: int) -> None:
    """Until every thread of the process is stopped by a signal, which reaches them one by one."""
    end = time.monotonic() + job.deadline
    while any(
        (task / "stat").read_text().rpartition(")")[2].split()[0] != "T" for task in Path(f"/proc/{pid}/task").iterdir()
    ):
        assert time.monotonic() < end, f"process {pid} was not stopped within {job.deadline:g} s"


def steps_of(args: Sequence[str]) -> int:
    """The `--steps` of the arguments, or the script's default."""
    return int(args[args.index("--steps") + 1]) if "--steps" in args else 9
