"""Schedules of random faults: reproducible, survivable by construction, and written so that they can be read again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from leto_elastic.errors import ConfigError
from leto_elastic.testing.chaos import (
    KINDS,
    LOSSES,
    MEANING,
    Fault,
    Topology,
    parse,
    run_seed,
    schedule,
    why_not_survivable,
    written,
)

ONE = Topology()
THREE = Topology(nodes=3, per_node=1, parity=1)
HOSTS = Topology(nodes=3, per_node=2, parity=1, hosts=True)
TOPOLOGIES = [ONE, THREE, HOSTS, replace(THREE, parity=0)]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=["one", "three", "hosts", "unprotected"])
def test_the_same_seed_makes_the_same_survivable_faults(topology: Topology) -> None:
    for index in range(100):
        faults = schedule(run_seed(5, index), topology, count=20, gap=1.0)
        assert faults == schedule(run_seed(5, index), topology, count=20, gap=1.0)
        assert len(faults) == 20
        assert why_not_survivable(faults, topology) == []
        assert parse(written(faults)) == faults


def test_another_seed_or_run_makes_other_faults() -> None:
    made = {written(schedule(run_seed(seed, index), ONE, count=5, gap=1.0)) for seed in range(5) for index in range(5)}
    assert len(made) == 25


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=["one", "three", "hosts", "unprotected"])
def test_all_kinds_come_that_can(topology: Topology) -> None:
    seen = {fault.kind for index in range(40) for fault in schedule(index, topology, count=30, gap=1.0)}
    assert seen == set(topology.kinds())


def test_what_each_topology_survives() -> None:
    kinds = set(KINDS) - {"last"}
    assert set(HOSTS.kinds()) == kinds
    assert kinds - set(THREE.kinds()) == {"link", "cut"}
    assert kinds - set(ONE.kinds()) == {"agent_kill", "node", "leader", "link", "cut"}
    assert not any(ONE.loses(kind) for kind in KINDS)
    assert {kind for kind in KINDS if THREE.loses(kind)} == LOSSES
    assert set(MEANING) == set(KINDS)


def test_a_seed_means_the_same_on_every_machine() -> None:
    """A replay line from elsewhere must be worth something."""
    faults = schedule(run_seed(1, 0), ONE, count=3, gap=1.0)
    assert written(faults) == (
        "0.407 kill pick=883 count=1 hold=0; 0.688 etcd_pause pick=115 count=1 hold=2.586; "
        "2.648 several pick=268 count=3 hold=0"
    )


@pytest.mark.parametrize(
    ("faults", "topology", "words"),
    [
        ([Fault(1.0, "node", hold=1.0)], ONE, "nothing of that kind"),
        ([Fault(1.0, "link", hold=0.1)], THREE, "nothing of that kind"),
        ([Fault(2.0, "kill"), Fault(1.0, "kill")], ONE, "comes before"),
        ([Fault(-1.0, "kill")], ONE, "comes before"),
        ([Fault(1.0, "several", count=5)], ONE, "hits 5 of 4"),
        ([Fault(1.0, "stop", hold=60.0)], ONE, "lasts 60 s"),
        ([Fault(1.0, "agent_stop", hold=1.9)], THREE, "lasts 1.9 s"),
        ([Fault(1.0, "etcd_pause", hold=2.0), Fault(4.0, "etcd_kill", hold=1.0)], ONE, "etcd was away"),
    ],
)
def test_what_is_not_survivable_is_told(faults: Sequence[Fault], topology: Topology, words: str) -> None:
    (reason,) = why_not_survivable(faults, topology)
    assert words in reason


def test_only_some_kinds_may_be_asked_for() -> None:
    assert {fault.kind for fault in schedule(1, ONE, count=20, gap=0.5, kinds=["kill", "shadow"])} == {"kill", "shadow"}
    assert len(schedule(1, ONE, count=5, gap=0.5, kinds=["etcd_kill"])) == 5, "they keep their distance"
    with pytest.raises(ValueError, match="node"):
        schedule(1, ONE, count=20, gap=0.5, kinds=["kill", "node"])


@pytest.mark.parametrize("text", ["1.0", "1.0 crash", "x kill", "1.0 kill pick=a", "1.0 kill rank=1", "1.0 kill pick"])
def test_a_plan_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not SECONDS KIND|there is no"):
        parse(text)
