"""An agent and the deaths of its processes: real processes and signals, workers without torch."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from leto_elastic.launch.segments import Memory, Room
from leto_elastic.launch.terms import Interrupted
from leto_elastic.recovery.policy import Policy, ShadowPolicy
from tests.process.agent_rig import Rig, no_shadows

pytestmark = pytest.mark.process


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_killed_trainer_is_replaced_and_the_others_stay(tmp_path: Path) -> None:
    rig = Rig(tmp_path)

    async def scenario(rig: Rig) -> None:
        await rig.parked()
        before = [rig.trainer(rank) for rank in range(3)]
        shadow = rig.shadow(1)
        rig.kill(before[1])
        recovery = await rig.event("recovery")
        assert [rig.trainer(rank) for rank in range(3)] == [before[0], shadow, before[2]]
        assert recovery["rank"] == 1
        assert recovery["ranks"] == [1]
        assert recovery["epoch"] == 1
        assert recovery["cause"] == "signal"
        assert recovery["action"] == "promote"
        assert recovery["resolution"] == "rerun"
        assert recovery["pids"] == {"1": shadow}
        assert recovery["stall_ms"] > 0
        assert set(recovery["phases_ms"]) == {"detect", "plan", "abort", "rebuild", "attach", "resolve", "first_step"}
        await rig.event("shadow_ready", count=2, rank=1)  # a new one
        assert rig.shadow(1) not in (shadow, *before)
        rig.finish()

    outcome = rig.run(scenario)
    assert outcome.reason is None
    assert outcome.failures == {}
    failure = rig.all("failure")[0]
    assert (failure["rank"], failure["cause"], failure["phase"]) == (1, "signal", "compute")
    assert failure["step"] >= 1
    lines = rig.output(1).splitlines()
    assert lines[0].startswith("trainer rank=1")
    assert lines[1:] == ["promoted rank=1 epoch=1 nice=0", "finished rank=1"], "it writes on in the trainer's log"
    assert rig.all("run_finished") == [{"event": "run_finished", "state": "succeeded"}]


@pytest.mark.parametrize("ranks", [(0, 2), (0, 1, 2)], ids=["two", "all"])
def test_several_at_once(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    rig = Rig(tmp_path)

    async def scenario(rig: Rig) -> None:
        await rig.parked()
        before = [rig.trainer(rank) for rank in range(3)]
        rig.kill(*(before[rank] for rank in ranks))
        while True:  # one plan if all deaths were seen within collect_ms, else more
            recovery = await rig.event("recovery", count=len(rig.all("recovery")) + 1)
            if len({pid for pid in (rig.trainer(rank) for rank in range(3)) if pid not in before}) == len(ranks):
                break
        assert recovery["cause"] == "signal"
        for rank in set(range(3)) - set(ranks):
            assert rig.trainer(rank) == before[rank]
        rig.finish()

    assert rig.run(scenario).reason is None
    assert sorted({rank for event in rig.all("recovery") for rank in event["ranks"]}) == list(ranks)


def test_a_parked_shadow_that_dies_is_started_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path)

    async def scenario(rig: Rig) -> None:
        await rig.parked()
        first = rig.shadow(2)
        rig.kill(first)
        await rig.event("shadow_ready", count=2, rank=2)
        assert rig.shadow(2) != first
        rig.finish()

    assert rig.run(scenario).reason is None
    assert rig.all("failure") == []
    assert rig.all("recovery") == []


def test_without_a_shadow_the_rank_is_respawned(tmp_path: Path) -> None:
    rig = Rig(tmp_path, policy=no_shadows())

    async def scenario(rig: Rig) -> None:
        await rig.protected()
        survivor = rig.trainer(0)
        rig.kill(rig.trainer(1))
        recovery = await rig.event("recovery")
        assert recovery["action"] == "respawn"
        assert rig.trainer(0) == survivor
        rig.finish()

    assert rig.run(scenario).reason is None
    assert "promoted rank=1 epoch=1 nice=0" in rig.output(1)


def test_second_death_while_the_epoch_is_built(tmp_path: Path) -> None:
    rig = Rig(tmp_path, env={"FAKE_FAULT": "rebuild 0"})

    async def scenario(rig: Rig) -> None:
        await rig.parked()
        untouched = rig.trainer(2)
        rig.kill(rig.trainer(1))
        recovery = await rig.event("recovery")
        assert recovery["epoch"] == 2
        assert recovery["ranks"] == [0, 1]
        assert rig.trainer(2) == untouched
        rig.finish()

    assert rig.run(scenario).reason is None
    assert len(rig.all("failure")) == 2
    assert len(rig.all("recovery")) == 1


def test_shadow_that_dies_while_it_is_promoted(tmp_path: Path) -> None:
    rig = Rig(tmp_path, env={"FAKE_FAULT": "promoted 1"})

    async def scenario(rig: Rig) -> None:
        await rig.parked()
        untouched = [rig.trainer(0), rig.trainer(2)]
        rig.kill(rig.trainer(1))
        recovery = await rig.event("recovery")
        assert recovery["epoch"] == 2
        assert recovery["actions"] == {"1": "respawn"}
        assert [rig.trainer(0), rig.trainer(2)] == untouched
        rig.finish()

    assert rig.run(scenario).reason is None


def test_trainer_and_its_shadow_together(tmp_path: Path) -> None:
    rig = Rig(tmp_path)

    async def scenario(rig: Rig) -> None:
        await rig.parked()
        rig.kill(rig.shadow(1), rig.trainer(1))
        recovery = await rig.event("recovery")
        assert recovery["actions"] == {"1": "respawn"}
        rig.finish()

    assert rig.run(scenario).reason is None


def test_exception_is_its_own_cause(tmp_path: Path) -> None:
    rig = Rig(tmp_path)

    async def scenario(rig: Rig) -> None:
        await rig.parked()
        (rig.run_dir / "exit.2").touch()
        assert (await rig.event("recovery"))["cause"] == "exception"
        rig.finish()

    assert rig.run(scenario).reason is None
    assert rig.all("failure")[0]["code"] == 3


def test_death_before_the_first_commit_of_all_ends_the_job(tmp_path: Path) -> None:
    rig = Rig(tmp_path, env={"FAKE_FAULT": "setup 1"})

    async def scenario(rig: Rig) -> None:
        await rig.event("failure")

    outcome = rig.run(scenario)
    assert outcome.reason == "rank 1 ended (signal 9) before every rank had committed its first step"
    assert list(outcome.failures) == [1]
    assert outcome.failures[1].exitcode == -9
    assert rig.all("run_finished") == [{"event": "run_finished", "state": "failed"}]


def test_limits_end_the_job_with_the_failure(tmp_path: Path) -> None:
    policy = Policy(limits=Policy().limits.__class__(per_job=0))
    rig = Rig(tmp_path, policy=policy)

    async def scenario(rig: Rig) -> None:
        await rig.parked()
        rig.kill(rig.trainer(0))
        await rig.event("failure")

    outcome = rig.run(scenario)
    assert outcome.reason is not None
    assert "limits.per_job" in outcome.reason
    assert list(outcome.failures) == [0]


def test_shadows_that_never_get_ready_are_given_up(tmp_path: Path) -> None:
    rig = Rig(tmp_path, env={"FAKE_ALWAYS": "starting 1"})

    async def scenario(rig: Rig) -> None:
        given_up = await rig.event("shadow_given_up", slot=1)
        assert "3 times in a row" in given_up["reason"]
        for rank in (0, 2):
            await rig.event("shadow_ready", rank=rank)
        rig.finish()

    assert rig.run(scenario).reason is None
    assert len(rig.all("worker_started", role="shadow", rank=1)) == 3


def test_unfit_shadow_is_reported_once_and_then_the_job_says_why_it_ends(tmp_path: Path) -> None:
    rig = Rig(tmp_path, env={"FAKE_UNFIT": "1"})

    async def scenario(rig: Rig) -> None:
        unfit = await rig.event("shadow_unfit")
        assert unfit["reason"] == "told to"
        for rank in (0, 2):
            await rig.event("shadow_ready", rank=rank)
        rig.kill(rig.trainer(1))
        await rig.event("shadow_unfit", count=2)

    outcome = rig.run(scenario)
    assert outcome.reason == "rank 1 cannot be replaced: told to"
    assert list(outcome.failures) == [1]


def test_zygote_dies_and_is_started_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path)

    async def scenario(rig: Rig) -> None:
        await rig.parked()
        zygote = rig.forker.pid
        assert zygote is not None
        rig.kill(zygote)
        rig.kill(rig.trainer(1))
        await rig.event("recovery")
        await rig.event("shadow_ready", count=2, rank=1)
        assert rig.forker.pid not in (None, zygote)
        rig.finish()

    assert rig.run(scenario).reason is None


def test_death_signal_ends_everything(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    pids: list[int] = []

    async def scenario(rig: Rig) -> None:
        await rig.parked()
        pids.extend(rig.trainer(rank) for rank in range(3))
        pids.extend(rig.shadow(rank) for rank in range(3))
        rig.supervisor.interrupt(signal.SIGTERM)

    with pytest.raises(Interrupted):
        rig.run(scenario)
    assert not [pid for pid in pids if alive(pid)]
    assert rig.all("run_finished") == [{"event": "run_finished", "state": "interrupted"}]


def test_a_stopped_trainer_does_not_outlive_the_shutdown_timeout(tmp_path: Path) -> None:
    rig = Rig(tmp_path, shutdown=0.3)
    pids: list[int] = []

    async def scenario(rig: Rig) -> None:
        await rig.parked()
        pids.append(rig.trainer(0))
        os.kill(pids[0], signal.SIGSTOP)
        rig.supervisor.interrupt(signal.SIGTERM)

    with pytest.raises(Interrupted):
        rig.run(scenario)
    assert not alive(pids[0])


class ShortMemory(Memory):
    """Says what a test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.available = 50

    def room(self) -> Room:
        return Room(self.available << 30, 100 << 30, "the machine")

    def pressure(self) -> float:
        return 0.0


def test_idle_shadows_go_when_memory_is_short_and_come_back(tmp_path: Path) -> None:
    memory = ShortMemory()
    policy = Policy(shadow=ShadowPolicy(retry_after=0.1))
    rig = Rig(tmp_path, policy=policy, memory=memory)

    async def scenario(rig: Rig) -> None:
        await rig.parked()
        memory.available = 1
        for slot in range(3):
            given_up = await rig.event("shadow_given_up", slot=slot)
            assert "1024 of 102400 MiB" in given_up["reason"]
        assert len(rig.all("shadow_ready")) == 3
        memory.available = 50
        for rank in range(3):
            await rig.event("shadow_ready", count=2, rank=rank)
        rig.finish()

    assert rig.run(scenario).reason is None
    assert len(rig.all("shadow_given_up")) == 3


def test_refused_memory_is_told_with_numbers(tmp_path: Path) -> None:
    memory = ShortMemory()
    memory.available = 0
    rig = Rig(tmp_path, memory=memory)

    async def scenario(rig: Rig) -> None:
        await rig.event("failure")

    rig.run(scenario)
    stderr = "".join(path.read_text() for path in tmp_path.glob("logs/*/attempt_0/*/stderr.log"))
    assert "the machine has 0.0 of 102400.0 MiB left" in stderr


def test_nothing_grows(tmp_path: Path) -> None:
    rig = Rig(tmp_path, world=2)
    counts: list[tuple[int, ...]] = []

    async def scenario(rig: Rig) -> None:
        await rig.parked()
        for number in range(8):
            rig.kill(rig.trainer(number % 2))
            await rig.event("recovery", count=number + 1)
            await rig.event("shadow_ready", count=number + 3)
            counts.append(tuple(len(list(Path("/proc/self", kind).iterdir())) for kind in ("fd", "task")))
        rig.finish()

    assert rig.run(scenario).reason is None
    assert counts[1] == counts[-1]
