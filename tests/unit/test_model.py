"""Lost memory: whatever is lost at whatever instant, everyone goes on from one whole version, and not from far back."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from leto_elastic.state.header import generation_of
from tests.scenarios.memory import Cluster, Over, Setting

SETTINGS = [
    Setting(4, 3, 1),
    Setting(4, 3, 1, buffers=2, every=1),
    Setting(4, 2, 2),
    Setting(4, 2, 2, buffers=2),
    Setting(2, 1, 1),
    Setting(2, 1, 1, buffers=2, every=3),
    Setting(3, 1, 1, replicas=True),
    Setting(3, 1, 2, every=1),
]

RANK, TIMES = st.integers(0, 3), st.integers(1, 12)


class Machine(RuleBasedStateMachine):
    """Everything that may happen to a `Cluster`."""

    setting = Setting()
    cluster: Cluster

    @initialize(warm=st.integers(0, 3))
    def start(self, warm: int) -> None:
        self.cluster = Cluster(self.setting)
        self.cluster.go_on(warm)

    def recovering(self) -> bool:
        return self.cluster.broken

    @rule(rank=RANK, times=TIMES)
    def move(self, rank: int, times: int) -> None:
        for _ in range(times):
            if not self.cluster.move(rank % self.setting.nodes):
                break

    @rule(times=TIMES)
    def move_all(self, times: int) -> None:
        for _ in range(times):
            for rank in self.cluster.ranks:
                self.cluster.move(rank)

    @rule(rank=RANK, times=st.integers(1, 20))
    def work(self, rank: int, times: int) -> None:
        for _ in range(times):
            if not self.cluster.work(rank % self.setting.nodes):
                break

    @rule()
    def work_all(self) -> None:
        for rank in self.cluster.ranks:
            while self.cluster.work(rank):
                pass

    @rule(rank=RANK)
    def kill(self, rank: int) -> None:
        self.cluster.kill(rank % self.setting.nodes)

    @rule(position=RANK)
    def lose(self, position: int) -> None:
        self.cluster.lose(position % self.setting.nodes)

    @precondition(recovering)
    @rule(times=TIMES)
    def recover(self, times: int) -> None:
        try:
            for _ in range(times):
                if not self.cluster.recover():
                    break
        except Over:
            self.cluster = Cluster(self.setting)  # another job

    def teardown(self) -> None:
        if hasattr(self, "cluster"):
            try:
                self.cluster.go_on(2 * self.setting.every + 3)
            except Over:
                return
            tags = [memory.header.agreed for memory in self.cluster.memory.values()]
            assert {generation_of(tag) for tag in tags} == {self.cluster.generation}, "not protected again"


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_whatever_is_lost_everyone_goes_on_from_one_whole_version(setting: Setting) -> None:
    class Here(Machine):
        pass

    Here.setting = setting
    run_state_machine_as_test(
        Here,
        settings=settings(
            max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def at(setting: Setting, moves: int, slow: int) -> Cluster:
    """A job after so many moves of everyone in turn; the agent of rank `slow` stops at the version after the next."""
    cluster = Cluster(setting)
    cluster.go_on(2)
    for _ in range(moves):
        for rank in cluster.ranks:
            cluster.move(rank)
            if rank != slow:
                cluster.work(rank)
    return cluster


@pytest.mark.parametrize(
    "setting", [Setting(4, 3, 1, every=1), Setting(4, 2, 2, every=1), Setting(2, 1, 1, every=1)], ids=str
)
@pytest.mark.parametrize("slow", [-1, 1])
def test_a_node_is_lost_at_every_instant_of_a_step_and_another_at_every_instant_of_the_recovery(
    setting: Setting, slow: int
) -> None:
    worlds = 0
    for moves in range(24):
        for between in range(0, 12, 2 if setting.parity > 1 else 12):
            cluster = at(setting, moves, slow)
            cluster.lose(0)
            for _ in range(between):
                cluster.recover()
            if setting.parity > 1:
                cluster.lose(2)
            cluster.go_on(3)
            worlds += 1
    assert worlds >= 24


@pytest.mark.parametrize("buffers", [1, 2])
def test_what_only_the_lost_rank_had_sent_does_not_replace_what_is_protected(buffers: int) -> None:
    """Version 4 can be decoded for rank 0, not for rank 2, whose agent is slow; which is lost next."""
    cluster = Cluster(Setting(4, 2, 2, buffers=buffers, every=2))
    cluster.go_on(4)
    before = cluster.floor
    for rank in (0, 1, 3):
        while cluster.work(rank):
            pass
    cluster.lose(0)
    while cluster.recover():
        pass
    for rank in cluster.ranks:
        cluster.move(rank)
    cluster.lose(2)
    cluster.go_on(3)
    assert before >= 0


def send(cluster: Cluster, *ranks: int) -> None:
    for rank in ranks:
        while cluster.work(rank):
            pass


def recover(cluster: Cluster) -> None:
    while cluster.recover():
        pass


def start(cluster: Cluster) -> None:
    """Everyone resolves."""
    for rank in cluster.ranks:
        cluster.move(rank)
        while cluster.state[rank] == "moving":
            cluster.move(rank)


ALL_BUT_SUMS = 1 + 2 * 3  # moves: X, and three parts that are read and finished


def test_a_version_whose_sums_are_still_on_their_way_is_not_chosen() -> None:
    """Else it would be decoded, and then not believed."""
    cluster = Cluster(Setting(4, 3, 1, every=1))
    cluster.go_on(3)
    send(cluster, 1, 2, 3)
    for _ in range(ALL_BUT_SUMS):
        assert cluster.work(0)
    cluster.lose(0)
    recover(cluster)
    assert {memory.header.position.step for memory in cluster.memory.values()} == {2}
    cluster.go_on(3)


def test_a_version_that_is_protected_again_is_decoded_from_the_tag_that_is_whole() -> None:
    """The spare dies as well, before its first attempt has come to its end."""
    cluster = Cluster(Setting(4, 3, 1, every=1))
    cluster.go_on(3)
    send(cluster, *cluster.ranks)
    cluster.lose(0)
    recover(cluster)
    start(cluster)
    send(cluster, 1, 2, 3)
    for _ in range(ALL_BUT_SUMS):
        assert cluster.work(0)
    cluster.lose(0)
    recover(cluster)
    assert {memory.header.position.step for memory in cluster.memory.values()} == {3}
    cluster.go_on(3)


@pytest.mark.parametrize("buffers", [1, 2])
def test_who_lost_the_result_of_a_vote_keeps_what_the_others_keep(buffers: int) -> None:
    """Else the ranks have no version in common when a node is lost after that."""
    cluster = Cluster(Setting(4, 3, 1, buffers=buffers, every=1))
    cluster.go_on(3)
    send(cluster, *cluster.ranks)
    for rank in (*cluster.ranks, 0, 0):
        cluster.move(rank)
        while rank == 0 and cluster.state[0] == "moving":
            cluster.move(0)
    assert cluster.memory[0].header.position.step == 4
    cluster.kill(1)
    recover(cluster)
    start(cluster)
    if buffers == 2:  # version 3 was kept, and is sent from there
        send(cluster, *cluster.ranks)
    for _ in range(40):  # a step further, and nothing of it protected
        for rank in cluster.ranks:
            cluster.move(rank)
    cluster.lose(3)
    cluster.go_on(3)


def test_a_replica_that_has_yet_to_roll_forward_is_not_copied_from() -> None:
    cluster = Cluster(Setting(3, 1, 1, replicas=True))
    cluster.go_on(3)
    send(cluster, *cluster.ranks)
    for rank in cluster.ranks:
        cluster.move(rank)  # to VOTE(3)
    while cluster.memory[0].header.position.step == 3 or cluster.state[0] == "moving":
        cluster.move(0)
    cluster.move(1)
    cluster.move(1)
    assert "UPDATE" in str(cluster.memory[1].header.position)
    cluster.kill(1)
    cluster.lose(0)
    recover(cluster)
    cluster.go_on(3)
