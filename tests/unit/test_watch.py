"""When trainers count as hung, told second by second."""

from __future__ import annotations

import pytest

from leto_elastic.launch.watch import Finding, Watch
from leto_elastic.recovery.policy import HangPolicy
from leto_elastic.state.header import Signs

POLICY = HangPolicy(factor=10, min=2, first=300, pause=600, heartbeat=5)
TICK = 0.025


class Node:
    """Two trainers, and a clock that is moved on by small ticks."""

    def __init__(self, policy: HangPolicy = POLICY) -> None:
        self.watch = Watch(policy)
        self.now = 1000.0
        self.step = 0
        self.calls = 0
        self.paused = {0: 0.0, 1: 0.0}
        self.stopped: dict[int, float] = {}  # rank to its last beat
        self.recovering = False

    def tick(self) -> Finding | None:
        self.now += TICK
        if self.recovering:
            self.watch.rest()
            return None
        return self.watch.look(
            self.now,
            {
                rank: Signs(
                    self.step, bytes([self.step, self.calls]), self.stopped.get(rank, self.now), self.paused[rank]
                )
                for rank in (0, 1)
            },
        )

    def quiet(self, seconds: float) -> Node:
        """So much time passes, and nothing is found."""
        end = self.now + seconds
        while self.now < end:
            finding = self.tick()
            assert finding is None or (finding.silent, finding.stalled) == ({}, 0.0), self.now
        return self

    def steps(self, *seconds: float) -> Node:
        for duration in seconds:
            self.quiet(duration)
            self.step += 1
        return self

    def found(self, within: float) -> tuple[float, Finding]:
        """Seconds until something is found."""
        start = self.now
        while self.now < start + within:
            finding = self.tick()
            if finding is not None and (finding.silent or finding.stalled):
                return self.now - start, finding
        raise AssertionError(f"nothing was found within {within} s")

    def stop(self, rank: int) -> None:
        self.stopped[rank] = self.now


def test_a_stall_is_found_after_the_learned_limit() -> None:
    seconds, finding = Node().steps(1, 1, 1, 1, 1).found(20)
    assert seconds == pytest.approx(10, abs=0.5)
    assert finding.silent == {}
    assert finding.limit == pytest.approx(10, abs=0.5)


def test_the_limit_is_never_below_the_least() -> None:
    seconds, _ = Node().steps(*[0.1] * 30).found(20)
    assert seconds == pytest.approx(2, abs=0.1)


def test_the_longest_of_the_last_steps_counts() -> None:
    node = Node().steps(0.5, 0.5, 0.5, 1, *[0.25] * 10)
    assert node.found(20)[0] == pytest.approx(10, abs=0.3)
    node = Node().steps(0.5, 0.5, 0.5, 1, *[0.25] * 25)
    assert node.found(20)[0] == pytest.approx(2.5, abs=0.3), "forgotten"


@pytest.mark.parametrize("factor", [10.0, 6.0])
def test_steps_that_vary_by_five_times_are_no_stall(factor: float) -> None:
    node = Node(HangPolicy(factor=factor, min=0.1, first=300, pause=600, heartbeat=5))
    node.steps(*[0.2] * 30, 1.0, *[0.2] * 30, 1.0, 0.2, 1.0)


def test_a_long_first_step_is_no_stall() -> None:
    Node().steps(200, 100, 50, 0.1, 0.1)


def test_a_first_step_without_end_is_found() -> None:
    assert Node().found(400)[0] == pytest.approx(300, abs=0.1)


def test_progress_within_a_step_is_progress() -> None:
    node = Node().steps(*[0.1] * 5)
    for _ in range(10):
        node.quiet(1.9)
        node.calls += 1


def test_a_silent_trainer_is_found_alone() -> None:
    node = Node(HangPolicy(factor=10, min=60, first=300, pause=600, heartbeat=5)).steps(*[0.1] * 5)
    node.stop(1)
    seconds, finding = node.found(20)
    assert seconds == pytest.approx(5, abs=0.1)
    assert (list(finding.silent), finding.stalled) == ([1], 0.0)


def test_a_compilation_that_holds_the_interpreter_is_not_silence() -> None:
    node = Node().steps(1)
    node.stop(0)
    node.quiet(60)
    del node.stopped[0]
    node.steps(1, 1, 1)


def test_a_pause_holds_off_both_for_its_own_time() -> None:
    node = Node().steps(*[0.1] * 5)
    node.paused[0] = node.now + POLICY.pause
    node.stop(0)
    node.quiet(500)
    del node.stopped[0]
    node.paused[0] = 0.0
    node.quiet(1.5).steps(0.1, 0.1)
    node.paused[1] = node.now + POLICY.pause
    assert node.found(700)[0] == pytest.approx(600, abs=0.1)


def test_other_trainers_are_watched_while_one_has_paused() -> None:
    node = Node().steps(*[0.1] * 5)
    node.paused[0] = node.now + POLICY.pause
    node.stop(1)
    assert list(node.found(20)[1].silent) == [1]


def test_time_begins_anew_after_a_recovery_and_steps_stay_known() -> None:
    node = Node().steps(*[0.1] * 5).quiet(1.5)
    node.stop(1)
    node.recovering = True
    node.quiet(100)
    node.recovering = False
    node.quiet(1.5)
    del node.stopped[1]
    assert node.found(20)[0] == pytest.approx(0.5, abs=0.1), "and not 300: these are not its first steps"


def test_a_recovery_is_no_step() -> None:
    node = Node().steps(*[0.1] * 5)
    node.recovering = True
    node.quiet(50)
    node.step += 1
    node.recovering = False
    node.steps(0.1, 0.1)
    assert node.found(20)[0] == pytest.approx(2, abs=0.1)


def test_going_back_to_an_earlier_step_is_none_either() -> None:
    node = Node().steps(*[0.1] * 5)
    node.step -= 3
    node.steps(0.1, 0.1)
    assert node.found(20)[0] == pytest.approx(2, abs=0.1)


def test_an_agent_that_slept_itself_blames_nobody() -> None:
    node = Node().steps(*[0.1] * 5)
    node.stop(0)
    node.now += 3600
    node.quiet(1.9)


def test_what_was_found_is_found_again_until_something_moves() -> None:
    node = Node().steps(*[0.1] * 5)
    node.found(20)
    assert node.found(0.1)[0] == pytest.approx(TICK, abs=0.01)
    node.calls += 1
    node.quiet(1.9)
