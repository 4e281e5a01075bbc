"""Jobs that the benchmarks start, watch and stop: the example under torchrun, with leto or without.

What a job did is read from the step files that `examples/lm.py` writes (`LM_STEP_TIMES`), the same for both systems;
leto's events are read only to know when shadows are ready, and to compare its own figures with these.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MARK = "LM_STEP_TIMES"


class StepRecord(NamedTuple):
    """One step that one process finished; times are monotonic seconds."""

    step: int
    begin: float
    end: float
    pid: int


# A benchmark that is terminated leaves its `with` blocks, so that its job does not go on alone and slow down the next.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


class Training(ABC):
    """A job that writes the example's step files into `directory`, to be used as a context manager."""

    def __init__(self, system: str, ranks: int, directory: Path) -> None:
        self.system = system
        self.ranks = ranks
        self.directory = directory
        directory.mkdir(parents=True)
        self._steps: list[list[StepRecord]] = [[] for _ in range(ranks)]
        self._read = [0] * ranks

    @abstractmethod
    def wait_for(self, what: str, ready: Callable[[], Any], seconds: float) -> Any:
        """Poll `ready()` until it is truthy. Raises an error with the job's last lines when time is up."""

    @abstractmethod
    def events(self) -> list[dict[str, Any]]:
        """leto's events so far; none for a plain job."""

    @abstractmethod
    def settle(self) -> None:
        """Until a failure meets the job as it is in the long run: all that stands by for it is there."""

    @abstractmethod
    def strike(self, rng: random.Random) -> tuple[float, set[int]]:
        """SIGKILL something at random: when that was (monotonic seconds), and which ranks were hit."""

    def steps(self) -> list[list[StepRecord]]:
        """All records so far, by rank, in the order written."""
        for rank in range(self.ranks):
            path = self.directory / f"steps.rank{rank}.txt"
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read[rank])
                data = file.read()
            data = data[: data.rfind(b"\n") + 1]
            self._read[rank] += len(data)
            for line in data.decode().splitlines():
                step, begin, end, pid = line.split()
                self._steps[rank].append(StepRecord(int(step), float(begin), float(end), int(pid)))
        return self._steps

    def trainers(self) -> list[int]:
        """Process ids by rank, of those that finished a step last."""
        return [records[-1].pid for records in self.steps()]

    def wait_for_steps(self, count: int, seconds: float = 180.0) -> None:
        """Until every rank has finished `count` more steps than now."""
        wanted = [len(records) + count for records in self.steps()]
        self.wait_for(
            f"{count} steps", lambda: all(len(r) >= n for r, n in zip(self.steps(), wanted, strict=True)), seconds
        )


class Job(Training):
    """One run of torchrun in `directory`; a context manager that leaves no process behind.

    Args:
        system: "leto" or "plain".
        script: path of the training script, relative to the repository.
        options: the script's options.
    """

    def __init__(self, system: str, script: str, options: list[str], ranks: int, directory: Path) -> None:
        super().__init__(system, ranks, directory)
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--max-restarts=1000"]
        if system == "leto":
            launcher += ["--rdzv-backend=leto", f"--rdzv-conf=run_dir={directory}"]
        else:
            launcher += ["--standalone"]
            options = [*options, f"--run-dir={directory}"]
        environment = dict(os.environ, **{MARK: str(directory)}, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT / "examples"))
        environment["TMPDIR"] = str(directory)
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # plain gloo restarts fail without it
        self._log = (directory / "output.txt").open("wb")
        self.process = subprocess.Popen(
            [*launcher, str(ROOT / script), *options],
            env=environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()
        for pid in self.processes():
            print(f"warning: process {pid} outlived its {self.system} job; killed", file=sys.stderr)
            os.kill(pid, signal.SIGKILL)

    def events(self) -> list[dict[str, Any]]:
        """leto's events so far; none for a plain job."""
        path = self.directory / "events.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def processes(self) -> list[int]:
        """Processes of this job, found by the environment they inherited."""
        mark = f"{MARK}={self.directory}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # it ended
                continue
        return found

    def wait_for(self, what: str, ready: Callable[[], Any], seconds: float) -> Any:
        """Poll `ready()` until it is truthy. Raises RuntimeError with the job's last lines when time is up."""
        deadline = time.monotonic() + seconds
        while not (result := ready()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                tail = (self.directory / "output.txt").read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{self.system} job: no {what} within {seconds:.0f} s\n{tail}")
            time.sleep(0.1)
        return result

    def wait_for_shadows(self, seconds: float = 180.0) -> None:
        """Until every trainer of a leto job has a shadow that is ready."""

        def ready() -> bool:
            state = dict.fromkeys(range(self.ranks), False)
            for event in self.events():
                if event["event"] == "shadow_ready":
                    state[event["rank"]] = True
                elif event["event"] == "failure":
                    state[event["rank"]] = False
            return all(state.values())

        if self.system == "leto":
            self.wait_for("shadows", ready, seconds)

    def settle(self) -> None:
        """Until all shadows are ready."""
        self.wait_for_shadows()

    def strike(self, rng: random.Random) -> tuple[float, set[int]]:
        """Kill one rank."""
        victim = rng.randrange(self.ranks)
        pid = self.trainers()[victim]
        instant = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return instant, {victim}


def first_step_after(steps: list[list[StepRecord]], instant: float, beyond: int = -1) -> tuple[int, float] | None:
    """The first step that began after `instant` on every rank and was finished by every rank, and when it was.

    Only steps with higher numbers than `beyond` count.
    """
    ends: list[dict[int, float]] = []
    for records in steps:
        ends.append(
            {record.step: record.end for record in reversed(records) if record.begin > instant and record.step > beyond}
        )
    common = set.intersection(*(set(rank) for rank in ends))
    if not common:
        return None
    step = min(common, key=lambda number: max(rank[number] for rank in ends))
    return step, max(rank[step] for rank in ends)


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
