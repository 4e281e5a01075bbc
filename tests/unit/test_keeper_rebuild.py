"""Keepers, end to end in one process: what was protected comes back bit for bit, or not at all."""

from __future__ import annotations

import gc
import threading
import zlib
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leto_elastic.protect.copies import versions
from leto_elastic.protect.keeper import Keeper
from leto_elastic.protect.world import LOCAL, CannotRebuild, Refusal
from leto_elastic.state.header import Phase, tag_of
from leto_elastic.state.layout import decode
from tests.unit.keeper_rig import Job, Rank, bury, copies, job, pieces_of, until

MIB = 1 << 20
SIZES = [0, 1, 63, 64, 65, 1000, MIB - 1, MIB, MIB + 1, 3 * MIB + 9]


def protect(made: Job, step: int, agreed: int = -1) -> int:
    tag = tag_of(step, made.generation)
    events = made.protect(tag, step, agreed)
    assert {name for name, _ in events} == {"protected"}, events
    assert all(made.of(rank).header.sent == tag for rank in made.positions)
    return tag


def lose_and_rebuild(made: Job, positions: list[int], version: int, tag: int) -> None:
    """The nodes at these positions are replaced; all their ranks get back what they had."""
    lost = [rank for rank, position in made.positions.items() if position in positions]
    before = {rank: made.of(rank).get() for rank in lost}
    for position in positions:
        old = made.lose(position)
        bury(old)
    made.epoch += 1
    made.configure()
    sources = [position for position in made.nodes if position not in positions]
    for rank in lost:
        keeper = made.node_of(rank).keeper
        manifest = decode(keeper.fetch(rank, "manifest", 1, sources))
        assert keeper.fetch(rank, "record", 0, sources) == f"record {rank}".encode()
        assert keeper.fetch(rank, "extras", version, sources) == f"X({version}) of {rank}".encode()
        segments = Rank(len(before[rank]), seed=1000 + rank, replicas=manifest.replicas)
        assert segments.manifest == manifest
        made.attach(rank, segments)
    made.recover(lost, version, tag)
    for rank in lost:
        assert made.of(rank).get() == before[rank], f"rank {rank}"
        if tag != -1:
            assert made.node_of(rank).keeper.verify(rank, tag) == []


@pytest.mark.parametrize(
    ("counts", "code", "positions"),
    [
        ([1, 1], (1, 1), [1]),
        ([2, 2], (1, 1), [0]),
        ([1, 1, 1, 1], (3, 1), [2]),
        ([2, 2, 2, 2], (3, 1), [0]),
        ([2, 2, 2, 2], (2, 2), [1]),
        ([2, 2, 2, 2], (2, 2), [1, 2]),
        ([1, 1, 1, 1], (2, 2), [0, 3]),
        ([2, 1, 3, 1, 2], (2, 2), [0, 2]),
        ([2, 0, 1, 2], (2, 1), [3]),
        ([1, 1, 1], (1, 2), [0, 2]),
    ],
)
def test_lost_nodes(counts: list[int], code: tuple[int, int], positions: list[int]) -> None:
    with job(counts, code, sizes=[3 * MIB + 77, 2 * MIB + 5, 4 * MIB]) as made:
        copies(made)
        tag = protect(made, 5)
        lose_and_rebuild(made, positions, 5, tag)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    code=st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 2), (1, 2)]),
    sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=5),
    extra=st.integers(0, 1),
    data=st.data(),
)
def test_any_sizes(code: tuple[int, int], sizes: list[int], extra: int, data: st.DataObject) -> None:
    nodes = sum(code) + extra
    positions = data.draw(st.lists(st.integers(0, nodes - 1), min_size=1, max_size=code[1], unique=True))
    with job([1] * nodes, code, sizes) as made:
        copies(made)
        tag = protect(made, 3)
        lose_and_rebuild(made, positions, 3, tag)


def test_many_versions() -> None:
    """The agreed version survives the attempts after it; the memory of older ones is used again."""
    with job([2, 2, 2], (2, 1)) as made:
        copies(made)
        agreed = -1
        for step in range(1, 7):
            for rank in made.positions:
                made.of(rank).fill(100 * step + rank)
            held = made.nodes[0].keeper._copies._budget.held
            agreed = protect(made, step, agreed)
        assert made.nodes[0].keeper._copies._budget.held == held
        newest = {rank: made.of(rank).get() for rank in made.positions}
        for rank in (0, 1, 2):  # an attempt that not everybody finishes
            made.of(rank).fill(rank)
        made.protect(tag_of(7, 0), 7, agreed, only=(0, 1, 2))
        for rank in made.positions:
            made.of(rank).put(newest[rank])
        holdings = made.nodes[1].keeper.holdings()
        assert {tag for tag, _, _ in holdings.pieces} == {agreed}
        assert {tag for _, tag in holdings.protected} >= {agreed}
        lose_and_rebuild(made, [0], 6, agreed)


def test_the_lost_are_protected_again() -> None:
    """A new generation may begin with the version that the old one had, and counts on its own."""
    with job([1, 1, 1], (2, 1)) as made:
        copies(made)
        first = protect(made, 4)
        later = protect(made, 9, first)
        assert later > first
        lose_and_rebuild(made, [1], 9, later)
        made.epoch = made.generation = made.epoch + 1
        made.configure()
        again = protect(made, 4, first)
        assert again < later
        assert {tag for tag, _, _ in made.nodes[2].keeper.holdings().pieces} >= {again}
        lose_and_rebuild(made, [0], 4, again)


def test_replicas_send_no_parity() -> None:
    with job([1, 1, 1], (2, 1), replicas=[(0, 1, 2)]) as made:
        copies(made)
        tag = protect(made, 5)
        assert not any(node.keeper.holdings().pieces for node in made.nodes.values())
        lose_and_rebuild(made, [2], 5, tag)


def test_replicas_on_no_more_nodes_than_may_be_lost_at_once_are_coded_too() -> None:
    with job([1, 1, 1, 1], (2, 2), replicas=[(0, 1), (2, 3)]) as made:
        copies(made)
        tag = protect(made, 5)
        lose_and_rebuild(made, [0, 1], 5, tag)


def test_replicas_may_be_ahead_of_what_was_protected() -> None:
    with job([1, 1, 1], (2, 1), replicas=[(0, 1, 2)]) as made:
        copies(made)
        protect(made, 5)
        for rank in made.positions:
            made.of(rank).fill(6)
            made.node_of(rank).keeper.publish(rank, "extras", 6, f"X(6) of {rank}".encode())
        wait_for_extras(made, 6)
        lose_and_rebuild(made, [1], 6, -1)


def wait_for_extras(made: Job, version: int) -> None:
    """Until every keeper has X of that version of those it keeps."""
    assert made.placement is not None
    for rank in made.positions:
        for position in made.placement.keepers_of(rank):
            keeper = made.nodes[position].keeper
            until(partial(has_extras, keeper, rank, version))


def has_extras(keeper: Keeper, rank: int, version: int) -> bool:
    return (rank, version) in versions(keeper._copies.keys())


def test_local_stripe() -> None:
    with job([3], None, sizes=[2 * MIB + 3, MIB, 3 * MIB], local=True) as made:
        tag = protect(made, 2)
        assert made.nodes[0].keeper.holdings().pieces == [(tag, LOCAL, 0)]
        before = made.of(1).get()
        made.of(1).fill(99)
        made.recover([1], 2, tag)
        assert made.of(1).get() == before


def test_local_stripe_with_one_rank_is_a_copy() -> None:
    with job([1], None, local=True) as made:
        tag = protect(made, 2)
        before = made.of(0).get()
        made.of(0).fill(99)
        made.recover([0], 2, tag)
        assert made.of(0).get() == before


def test_both_tiers() -> None:
    """A lost rank comes from its node if it can, a lost node from the others."""
    with job([2, 2, 2], (2, 1), sizes=[2 * MIB + 3, MIB], local=True) as made:
        copies(made)
        tag = protect(made, 2)
        before = made.of(1).get()
        made.of(1).fill(99)
        made.recover([1], 2, tag)
        assert made.of(1).get() == before
        lose_and_rebuild(made, [0], 2, tag)


def test_from_a_snapshot_buffer() -> None:
    with job([1, 1, 1], (2, 1)) as made:
        copies(made)
        tag = tag_of(5, 0)
        for rank in made.positions:
            segments = made.of(rank)
            segments.write_snapshot(0, segments.get(), f"X(5) of {rank}".encode())
            segments.header.set_buffer(0, tag)
            segments.at(8, Phase.UPDATE)
            made.node_of(rank).keeper.protect(rank, tag, buffer=0, slot=-1, agreed=-1)
        assert all(node.mail.outcome()[0][0] == "protected" for node in made.nodes.values())
        lose_and_rebuild(made, [1], 5, tag)


def test_flipped_parity_is_another_loss() -> None:
    with job([1, 1, 1, 1], (2, 2)) as made:
        copies(made)
        tag = protect(made, 5)
        for memory in pieces_of(made.nodes[1]):
            memory[memory.size // 2] ^= 4
        lose_and_rebuild(made, [0], 5, tag)
        assert made.nodes[1].keeper.holdings().pieces == []
        assert made.nodes[1].mail.named("damaged")


def test_flipped_state_of_a_survivor_is_another_loss() -> None:
    with job([1, 1, 1, 1], (2, 2)) as made:
        copies(made)
        tag = protect(made, 5)
        made.of(1).flip(10)
        made.of(1).flip(made.of(1).size - 10)
        assert made.nodes[1].keeper.verify(1, tag) == [0, 1]
        lose_and_rebuild(made, [0], 5, tag)
        assert {event["rank"] for event in made.nodes[1].mail.named("damaged")} == {1}


def test_more_lost_than_there_is_parity() -> None:
    with job([1, 1, 1], (2, 1)) as made:
        copies(made)
        tag = protect(made, 5)
        for memory in pieces_of(made.nodes[2]):
            memory[7] ^= 4
        with pytest.raises(
            CannotRebuild, match=r"rank 0 cannot be rebuilt at version 5: node node-\d: .*damaged at tag"
        ):
            lose_and_rebuild(made, [0], 5, tag)


def test_damage_that_no_checksum_of_a_piece_shows() -> None:
    """What comes out must match the sums of its owner, whatever the sources say."""
    with job([1, 1, 1, 1], (2, 2)) as made:
        copies(made)
        tag = protect(made, 5)
        for position in (1, 2):
            for shelf in made.nodes[position].keeper._pieces._shelves.values():
                for piece in shelf.pieces.values():
                    piece.data[7] ^= 4
                    piece.crc = None if piece.crc is None else zlib.crc32(piece.data.tobytes())
        with pytest.raises(CannotRebuild, match="does not match its checksum"):
            lose_and_rebuild(made, [0], 5, tag)


def test_another_node_without_segments() -> None:
    with job([1, 1], (1, 1)) as made:
        keeper = made.nodes[0].keeper
        with pytest.raises(Refusal, match="rank 1 has no segments here"):
            keeper.verify(1, 3)
        with pytest.raises(CannotRebuild, match="the record of rank 0 cannot be had"):
            keeper.fetch(0, "record", 0, [1])


def test_nothing_is_left_behind() -> None:
    gc.collect()
    threads, fds = set(threading.enumerate()), set(Path("/proc/self/fd").iterdir())
    with job([2, 2, 2], (2, 1), local=True) as made:
        copies(made)
        tag = protect(made, 5)
        lose_and_rebuild(made, [0], 5, tag)
        made.nodes[0].keeper.detach(0)
    gc.collect()
    assert set(threading.enumerate()) == threads
    assert set(Path("/proc/self/fd").iterdir()) == fds
