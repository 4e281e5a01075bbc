"""Runs of `train.py` compared with the undisturbed run of the same arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from leto_elastic.testing.job import Digest, Job

TRAIN = Path(__file__).with_name("train.py")
POLICY = Path(__file__).with_name("policy.yaml")

Reference = Callable[..., "Outcome"]


class Outcome:
    """What must be equal: the digests and the sample lines of all ranks."""

    def __init__(self, job: Job, steps: int) -> None:
        self.digests: dict[int, Digest] = job.digests()
        ranks = sorted(self.digests)
        self.samples = {rank: (job.run_dir / f"samples.rank{rank}.txt").read_text().splitlines() for rank in ranks}
        assert ranks == [0, 1, 2, 3]
        for lines in self.samples.values():
            assert [int(line.split()[0]) for line in lines] == list(range(steps))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outcome) and (self.digests, self.samples) == (other.digests, other.samples)

    __hash__ = None  # type: ignore[assignment]


def train(run_dir: Path, *args: str, faults: str = "", deadline: float = 90.0, config: Path | None = POLICY) -> Job:
    """A job of four ranks with small chunks, so that an update has several."""
    conf = {"config": str(config)} if config is not None else {}
    return Job(TRAIN, *args, run_dir=run_dir, faults=faults, conf=conf, deadline=deadline)


def trainers(job: Job) -> dict[int, int]:
    """Rank to pid of the first trainers."""
    started = [e for e in job.events() if e["event"] == "worker_started" and e["role"] == "trainer"]
    return {int(str(e["rank"])): int(str(e["pid"])) for e in started[:4]}


def steps_of(args: Sequence[str]) -> int:
    """The `--steps` of the arguments, or the script's default."""
    return int(args[args.index("--steps") + 1]) if "--steps" in args else 9
