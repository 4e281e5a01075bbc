"""A torchrun job under test: started, watched through its events, hurt from outside, and ended with nothing left.

Every wait ends with the one deadline of the job, or as soon as torchrun ends. Nothing waits for time to pass:
`wait_event` waits for a line in `events.jsonl`, `wait` for the exit of torchrun. On leaving the `with` block whatever
is left of the job is killed, and reported as an error.

Example:
    >>> with Job("train.py", "--steps", "20", run_dir=tmp_path / "run") as job:
    ...     job.wait_event("shadow_ready", rank=2)
    ...     job.kill(job.pid_of(2))
    ...     job.expect_success()
    ...     assert job.recoveries()[0]["lost_steps"] == 0
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from leto_elastic.testing.processes import JobError, Launched, Resources, environment, gone, resources
from leto_elastic.testing.watching import Digest, Event, EventFile, Watched, digests_in

__all__ = ["TORCHRUN", "Digest", "Event", "Job", "JobError", "Resources", "gone", "resources"]

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=leto")


class Job(Launched, Watched):
    """A job, started by entering the context.

    Args:
        script: the training script; `args` are its arguments.
        run_dir: the job's run directory.
        nproc: workers.
        faults: `LETO_FAULTS` of the job.
        conf: more keys of `--rdzv-conf`.
        options: more options of torchrun.
        env: changes to the environment.
        deadline: seconds until everything must have ended, from the start on.
        launcher: the command that torchrun's options are appended to.
        grace: seconds that the job's processes have to be gone after torchrun is.
    """

    def __init__(
        self,
        script: str | Path,
        *args: str,
        run_dir: str | Path,
        nproc: int = 4,
        faults: str = "",
        conf: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        deadline: float = 120.0,
        launcher: Sequence[str] = TORCHRUN,
        grace: float = 5.0,
    ) -> None:
        self.run_dir = Path(run_dir)
        pairs = ",".join(f"{key}={value}" for key, value in {"run_dir": str(run_dir), **(conf or {})}.items())
        command = [*launcher, f"--nproc-per-node={nproc}", f"--rdzv-conf={pairs}", *options, str(script), *args]
        super().__init__(command, env=environment(faults, env), deadline=deadline, grace=grace)
        self._file = EventFile(self.run_dir / "events.jsonl")
        self._stale = self._file.inode

    def events(self) -> list[Event]:
        """All events written so far."""
        if self._file.inode == self._stale:  # of an earlier job, this one has not made its own yet
            return []
        return self._file.events()

    def digests(self) -> dict[int, Digest]:
        """By rank, from the lines `digest rank=R step=N sha256=HEX`; the last one of a rank counts."""
        return digests_in(self.output())

    def expect_success(self) -> None:
        """Wait for the end; exit code 0 and events of the right shape, or JobError."""
        code = self.wait()
        if code != 0:
            raise self.error(f"torchrun ended with exit code {code}")
        self._check_events()

    def expect_failure(self) -> int:
        """Wait for the end; an exit code that is not 0, which is returned, or JobError."""
        code = self.wait()
        if code == 0:
            raise self.error("torchrun ended with exit code 0, a failure was expected")
        return code

    def _hopeless(self, within: float) -> str | None:
        return f"torchrun ended with exit code {self.wait()}" if self.ended(within) else None

    def _last_events(self) -> Sequence[Event]:
        return self.events()[-15:]
