"""Attempts that are disturbed: by the trainer, by the network, by a later one. Whole, or not at all."""

from __future__ import annotations

import logging
import os
import queue
import threading

import numpy as np
import pytest

from leto_elastic.errors import LetoError
from leto_elastic.protect.budget import Budget
from leto_elastic.protect.buffers import Bytes
from leto_elastic.protect.mapped import Stream
from leto_elastic.protect.matrix import Code
from leto_elastic.protect.messages import ReadUnit
from leto_elastic.protect.store import Pieces
from leto_elastic.protect.world import CannotRebuild, PieceKey, Refusal
from leto_elastic.state.header import NO_TAG, Phase, tag_of
from tests.unit.keeper_rig import DEADLINE, ENGINE, Job, Proxy, bury, copies, job, until
from tests.unit.test_keeper_rebuild import lose_and_rebuild, protect, wait_for_extras

MIB = 1 << 20
TAG = tag_of(5, 0)


def start(made: Job, rank: int, step: int = 5, buffer: int = -1) -> None:
    segments = made.of(rank)
    segments.write_extras(step % 3, b"X")
    segments.at(step)
    made.node_of(rank).keeper.protect(rank, tag_of(step, 0), buffer=buffer, slot=step % 3, agreed=-1)


@pytest.mark.parametrize("phase", [Phase.UPDATE, Phase.DONE])
def test_the_trainer_goes_on_in_the_middle(phase: Phase) -> None:
    proxy = Proxy(stall=3 * MIB)
    with job([1, 1, 1], (2, 1), sizes=[40 * MIB], proxies={2: proxy}) as made:
        start(made, 0)
        assert proxy.stalled.wait(DEADLINE)
        made.of(0).at(5, phase)
        (name, fields) = made.nodes[0].mail.outcome()[0]
        assert (name, fields["rank"], fields["version"]) == ("given_up", 0, 5)
        assert str(fields["reason"]).startswith("the version is overwritten")
        assert made.of(0).header.sent == NO_TAG
        proxy.go.set()
        made.of(0).fill(6)
        tag = protect(made, 6)  # the next one is whole, though the last one had come half
        copies(made)
        wait_for_extras(made, 6)
        lose_and_rebuild_by_proxy(made, 0, 6, tag)


def lose_and_rebuild_by_proxy(made: Job, position: int, version: int, tag: int) -> None:
    made.via.clear()
    lose_and_rebuild(made, [position], version, tag)


def test_a_step_that_was_over_before_it_began() -> None:
    with job([1, 1], (1, 1)) as made:
        made.of(0).at(6)
        made.nodes[0].keeper.protect(0, TAG, buffer=-1, slot=0, agreed=-1)
        assert made.nodes[0].mail.outcome()[0][1]["reason"] == "the version is overwritten"


def test_extras_that_do_not_match() -> None:
    with job([1, 1], (1, 1)) as made:
        made.of(0).at(5)
        made.of(0).write_extras(2, b"abc")
        os.pwrite(made.of(0).fds["extras"], b"\xff", 2 * 4096 + 16)
        made.nodes[0].keeper.protect(0, TAG, buffer=-1, slot=2, agreed=-1)
        assert made.nodes[0].mail.outcome()[0][1]["reason"] == "the extras do not match their checksum"


def test_a_later_attempt_supersedes() -> None:
    proxy = Proxy(stall=3 * MIB)
    with job([1, 1, 1], (2, 1), sizes=[40 * MIB], proxies={2: proxy}) as made:
        segments = made.of(0)
        segments.header.set_buffer(0, TAG)
        segments.write_snapshot(0, segments.get(), b"X")
        start(made, 0, buffer=0)
        assert proxy.stalled.wait(DEADLINE)
        start(made, 0, step=7)
        name, fields = made.nodes[0].mail.outcome()[0]
        assert (name, fields["reason"]) == ("given_up", "superseded")
        proxy.go.set()
        name, fields = made.nodes[0].mail.outcome(2)[1]
        assert (name, fields["version"], fields["bytes"]) == ("protected", 7, 40 * MIB)
        assert segments.header.sent == tag_of(7, 0)


def test_a_new_plan_ends_an_attempt() -> None:
    proxy = Proxy(stall=3 * MIB)
    with job([1, 1, 1], (2, 1), sizes=[40 * MIB], proxies={2: proxy}) as made:
        start(made, 0)
        assert proxy.stalled.wait(DEADLINE)
        made.epoch += 1
        made.configure()
        assert made.nodes[0].mail.outcome()[0][1]["reason"] == "there is a new plan"


def test_a_byte_flipped_on_the_way(caplog: pytest.LogCaptureFixture) -> None:
    """The connection is dropped, nothing of the frame is used, and the rest comes over another one."""
    proxy = Proxy(flip=5 * MIB + 12345)
    with (
        caplog.at_level(logging.WARNING, "leto_elastic.protect.server"),
        job([1, 1, 1], (2, 1), sizes=[20 * MIB], proxies={2: proxy}) as made,
    ):
        copies(made)
        tag = protect(made, 5)
        assert [record for record in caplog.messages if "the payload of Chunk does not match its checksum" in record]
        assert proxy.passed[True] < 30 * MIB  # what had come before the damage was not sent again
        assert not any(node.mail.lost for node in made.nodes.values())
        wait_for_extras(made, 5)
        lose_and_rebuild_by_proxy(made, 0, 5, tag)


def test_a_byte_flipped_on_the_way_back() -> None:
    proxy = Proxy(flip_back=3 * MIB)
    with job([1, 1, 1], (2, 1), sizes=[20 * MIB], proxies={2: proxy}) as made:
        copies(made)
        tag = protect(made, 5)
        lose_and_rebuild(made, [0], 5, tag)
        assert proxy.passed[False] > 3 * MIB


def test_a_connection_that_breaks_is_made_again() -> None:
    """Nobody is reported as dead for it, and what had been published meanwhile arrives."""
    proxy = Proxy(stall=1)
    proxy.go.set()
    with job([1, 1, 1], (2, 1), proxies={1: proxy}) as made:
        protect(made, 5)
        before = proxy.connections
        server, proxy._sockets = proxy._sockets[0], proxy._sockets[1:]
        proxy.cut()
        proxy._sockets.append(server)
        made.nodes[0].keeper.publish(0, "extras", 9, b"X(9)")
        keeper = made.nodes[1].keeper
        until(lambda: (0, 9) in keeper.holdings().extras)
        assert proxy.connections > before
        assert not any(node.mail.lost for node in made.nodes.values())


def test_more_than_a_keeper_may_hold() -> None:
    with job([1, 1], (1, 1), sizes=[3 * MIB], limit=2 * MIB) as made:
        ended = made.protect(TAG, 5)
        assert {name for name, _ in ended} == {"given_up"}
        for _, fields in ended:
            assert "needs 3.0 MiB; this keeper holds 0.0 MiB and may hold 2.0" in str(fields["reason"])
        assert not any(node.keeper.holdings().pieces for node in made.nodes.values())


def test_copies_are_sent_to_whoever_is_new() -> None:
    with job([1, 1, 1], (2, 1)) as made:
        copies(made)
        for version in range(1, 5):
            made.nodes[0].keeper.publish(0, "extras", version, b"X")
        tag = protect(made, 5)
        assert made.placement is not None
        position = made.placement.keepers_of(0)[0]
        bury(made.lose(position))
        made.epoch += 1
        made.configure()
        keeper = made.nodes[position].keeper
        until(lambda: (0, tag) in keeper.holdings().protected and (0, "manifest") in keeper.holdings().records)
        assert [version for rank, version in keeper.holdings().extras if rank == 0] == [3, 4, 5]


def test_a_request_before_the_plan_waits_for_it() -> None:
    with job([1, 1], (1, 1)) as made:
        copies(made)
        made.epoch += 1
        made.nodes[0].keeper.configure(made.world(0))
        start(made, 0)
        assert not made.nodes[0].mail.wait_a_moment()
        made.nodes[1].keeper.configure(made.world(1))
        assert made.nodes[0].mail.outcome()[0][0] == "protected"


def test_reading_a_rank_waits_until_it_stands_still() -> None:
    with job([1, 1, 1], (2, 1)) as made:
        copies(made)
        tag = protect(made, 5)
        before = made.of(0).get()
        made.of(0).fill(9)
        made.epoch += 1
        made.configure()
        rebuilt = threading.Event()

        def rebuild() -> None:
            made.nodes[0].keeper.rebuild(0, 5, epoch=made.epoch, tag=tag, lost=[0], sources=[1, 2])
            rebuilt.set()

        thread = threading.Thread(target=rebuild)
        thread.start()
        made.nodes[1].keeper.serve(1, 4)
        made.nodes[2].keeper.serve(2, 5)
        assert not rebuilt.wait(0.1)
        made.nodes[1].keeper.serve(1, 5)
        thread.join(DEADLINE)
        assert rebuilt.is_set()
        assert made.of(0).get() == before


def test_a_rank_that_never_stands_still() -> None:
    with job([1, 1, 1], (2, 1), deadline=0.2) as made:
        copies(made)
        tag = protect(made, 5)
        with pytest.raises(CannotRebuild, match="rank 1 does not stand at version 5"):
            made.nodes[0].keeper.rebuild(0, 5, epoch=made.epoch, tag=tag, lost=[0], sources=[1, 2])


def test_a_rebuild_ends_when_there_is_a_plan_for_a_later_epoch() -> None:
    """In that one nobody stands anywhere before this node has said where it stands, which waits for the rebuild."""
    with job([1, 1, 1], (2, 1)) as made:
        copies(made)
        tag = protect(made, 5)
        ends: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

        def rebuild(epoch: int) -> None:
            try:
                made.nodes[0].keeper.rebuild(0, 5, epoch=epoch, tag=tag, lost=[0], sources=[1, 2])
            except LetoError as error:
                ends.put(error)

        thread = threading.Thread(target=rebuild, args=(made.epoch,))
        thread.start()
        made.nodes[2].keeper.serve(2, 5)
        made.epoch += 1
        made.configure()
        assert isinstance(ends.get(timeout=DEADLINE / 2), LetoError)
        thread.join(DEADLINE)
        rebuild(made.epoch - 1)
        assert "is over" in str(ends.get(timeout=DEADLINE))


def test_a_chunk_that_changed_while_it_was_copied_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The header is asked after the copy: what it then says holds for every byte that goes out."""
    with job([1, 1], (1, 1), sizes=[3 * MIB]) as made:
        segments = made.of(0)
        read = Stream.read

        def torn(stream: Stream, start: int, into: Bytes) -> None:
            if start == MIB:  # the trainer goes on in the middle of the second chunk
                segments.at(5, Phase.UPDATE)
                segments.flip(MIB + 7)
            read(stream, start, into)

        monkeypatch.setattr(Stream, "read", torn)
        start(made, 0)
        assert made.nodes[0].mail.outcome()[0][0] == "given_up"
        keeper = made.nodes[1].keeper
        (shelf,) = keeper._pieces._shelves.values()
        until(lambda: shelf.pieces[TAG].units[0].applied == MIB)
        made.nodes[0].keeper.close()  # whatever was on its way has come
        assert shelf.pieces[TAG].units[0].applied == MIB


def test_a_plan_ends_the_standing_still() -> None:
    with job([1, 1], (1, 1), deadline=0.2) as made:
        copies(made)
        tag = protect(made, 5)
        made.nodes[1].keeper.serve(1, 5)
        made.epoch += 1
        made.configure()
        request = ReadUnit(made.epoch, 1, 5, tag, 0, 1, 10)
        with pytest.raises(Refusal, match="does not stand at version 5"):
            made.nodes[1].keeper._desk.unit(request)


def test_a_unit_that_is_not_what_its_sender_says() -> None:
    damaged: list[object] = []
    pieces = Pieces(ENGINE, budget := Budget(1 << 20), lambda key, tag: damaged.append((key, tag)))
    key = PieceKey(0, 0)
    data = np.arange(100, dtype=np.uint8)
    assert pieces.begin(key, TAG, NO_TAG, 0, 100) == 0
    pieces.add(key, TAG, 0, 0, data, Code(2, 1))
    with pytest.raises(Refusal, match="its sender says 00000001"):
        pieces.finish(key, TAG, 0, 1, [0, 1])
    assert (pieces.complete(), budget.held) == ([], 0)
    assert pieces.begin(key, TAG, NO_TAG, 0, 100) == 0  # from the start
