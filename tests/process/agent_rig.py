"""Runs an agent's supervisor in this process, with real worker processes but without torch in them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsSpecs, Std

from leto_elastic.launch.deciding import Alone, Decider
from leto_elastic.launch.forker import Forker
from leto_elastic.launch.logs import Logs
from leto_elastic.launch.posix import become_subreaper
from leto_elastic.launch.segments import Memory
from leto_elastic.launch.setup import Entry
from leto_elastic.launch.supervisor import Supervisor
from leto_elastic.launch.terms import Outcome, Settings
from leto_elastic.launch.world import World
from leto_elastic.observe.events import EventLog
from leto_elastic.recovery.policy import Policy, ShadowPolicy
from leto_elastic.wire import StoreAddress

FAKE_WORKER = Path(__file__).with_name("fake_worker.py")

Event = dict[str, Any]


class WatchedLog(EventLog):
    """An event log that can be waited on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.seen: list[Event] = []
        self.news = asyncio.Event()

    def write(self, event: str, **fields: object) -> None:
        super().write(event, **fields)
        self.seen.append({"event": event, **fields})
        self.news.set()


@dataclass
class Rig:
    """One job. `run` runs it together with a scenario that is told as a coroutine."""

    directory: Path
    world: int = 3
    entry: Entry = field(default_factory=lambda: Entry("script", (str(FAKE_WORKER),)))
    policy: Policy = field(default_factory=Policy)
    env: dict[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    shutdown: float = 5.0
    memory: Memory | None = None
    decider: Decider | None = None
    logs_specs: LogsSpecs | None = None
    deadline: float = 60.0

    def __post_init__(self) -> None:
        self.specs = self.logs_specs or DefaultLogsSpecs(log_dir=str(self.directory / "logs"), redirects=Std.ALL)
        self.attempts: list[dict[int, int]] = []
        self.logs: Logs | None = None

    # ---- Host

    def worker_env(self, local_rank: int, attempt: int, store: StoreAddress, world: World) -> dict[str, str]:
        return {
            "RANK": str(local_rank),
            "TORCHELASTIC_RUN_ID": "rig",
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "MASTER_PORT": str(store.port),
            **self.env,
        }

    def make_logs(self, envs: dict[int, dict[str, str]]) -> Logs:
        self.logs = Logs(self.specs, "rig", envs, None, (None, None))
        return self.logs

    def group_starting(self, attempt: int, world: World) -> None:
        assert attempt == len(self.attempts)
        self.attempts.append({})

    def trainer_started(self, local_rank: int, pid: int) -> None:
        self.attempts[-1][local_rank] = pid

    # ---- the run

    def run(self, scenario: Callable[[Rig], Awaitable[None]]) -> Outcome:
        """The job's outcome. Raises what the job or the scenario raises."""
        become_subreaper()
        try:
            return asyncio.run(self._run(scenario))
        finally:
            become_subreaper(False)

    async def _run(self, scenario: Callable[[Rig], Awaitable[None]]) -> Outcome:
        self.run_dir = self.directory / "run"
        self.run_dir.mkdir()
        self.events = WatchedLog(self.run_dir / "events.jsonl")
        settings = Settings(
            run_id="rig",
            run_dir=str(self.run_dir),
            slots=self.world,
            entry=self.entry,
            policy=self.policy,
            max_restarts=self.max_restarts,
            shutdown=self.shutdown,
            logs=str(self.run_dir / "logs"),
        )
        self.forker = Forker(30.0, imports=("leto_elastic.wire", "leto_elastic.state.header"))
        self.supervisor = Supervisor(
            settings, self, self.decider or Alone(self.policy, self.world), self.events, self.forker, self.memory
        )
        job = asyncio.create_task(self.supervisor.run())
        told = asyncio.create_task(self._tell(scenario))
        try:
            async with asyncio.timeout(self.deadline):
                await asyncio.wait((job, told), return_when=asyncio.FIRST_COMPLETED)
                if told.done():
                    told.result()
                outcome = await job
                await told
                return outcome
        finally:
            for task in (told, job):
                task.cancel()
            await asyncio.gather(job, told, return_exceptions=True)
            self.events.close()

    async def _tell(self, scenario: Callable[[Rig], Awaitable[None]]) -> None:
        await scenario(self)

    # ---- for scenarios

    async def event(self, name: str, count: int = 1, **fields: object) -> Event:
        """Wait for the `count`-th event of this name with these fields."""
        while True:
            found = self.all(name, **fields)
            if len(found) >= count:
                return found[count - 1]
            self.events.news.clear()
            await self.events.news.wait()

    def all(self, name: str, **fields: object) -> list[Event]:
        return [e for e in self.events.seen if e["event"] == name and fields.items() <= e.items()]

    async def protected(self) -> None:
        """Wait until every rank has committed."""
        while not self.supervisor._job.protected:
            await asyncio.sleep(0.001)  # nothing tells; the deadline of `run` bounds it

    async def parked(self) -> None:
        """Wait until every slot has a ready shadow."""
        for rank in range(self.world):
            await self.event("shadow_ready", rank=rank)

    def trainer(self, rank: int) -> int:
        """The process that trains a rank now."""
        slot = self.supervisor._job.slots[rank]
        assert slot.trainer is not None
        return slot.trainer.pid

    def shadow(self, rank: int) -> int:
        standby = self.supervisor._job.slots[rank].standby
        assert standby is not None
        return standby.pid

    def kill(self, *pids: int) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def finish(self) -> None:
        """Have the workers finish."""
        (self.run_dir / "finish").touch()

    def output(self, rank: int) -> str:
        """What a rank has written to stdout, over all its processes."""
        paths = list((self.directory / "logs").glob(f"*/attempt_*/{rank}/stdout.log"))
        return "".join(path.read_text() for path in sorted(paths))

    def written(self) -> list[Event]:
        return [json.loads(line) for line in (self.run_dir / "events.jsonl").read_text().splitlines()]


def no_shadows() -> Policy:
    return Policy(shadow=ShadowPolicy(per_slot=0))


def python(code: str, *arguments: str) -> Entry:
    """A program instead of a script."""
    return Entry("exec", (sys.executable, "-c", code, *arguments))
