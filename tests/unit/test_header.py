"""The word of a header: one store, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leto_elastic.state.header import GROUPS, HEADER_BYTES, Header, Phase, Position, key_of

POSITIONS = st.builds(
    Position,
    step=st.integers(0, (1 << 39) - 1),
    phase=st.sampled_from(Phase),
    slot=st.integers(0, 3),
    torn=st.booleans(),
    chunk=st.integers(0, (1 << 17) - 1),
)


@pytest.fixture
def segment() -> Iterator[int]:
    fd = os.memfd_create("header")
    os.ftruncate(fd, HEADER_BYTES)
    yield fd
    os.close(fd)


@given(POSITIONS)
def test_a_position_survives_packing(position: Position) -> None:
    word = position.pack()
    assert 0 <= word < 1 << 63
    assert Position.unpack(word) == position


@given(POSITIONS, POSITIONS)
def test_different_positions_have_different_words(one: Position, other: Position) -> None:
    assert (one.pack() == other.pack()) == (one == other)


def test_words_are_ordered_by_step_first() -> None:
    last = Position(7, Phase.DONE, slot=3, torn=True, chunk=(1 << 17) - 1)
    assert last.pack() < Position(8, Phase.SETUP).pack()


@pytest.mark.parametrize(
    "position",
    [
        Position(-1, Phase.COMPUTE),
        Position(1 << 39, Phase.COMPUTE),
        Position(0, Phase.COMPUTE, slot=4),
        Position(0, Phase.COMPUTE, slot=-1),
        Position(0, Phase.UPDATE, chunk=1 << 17),
        Position(0, Phase.UPDATE, chunk=-1),
    ],
)
def test_a_position_out_of_range_is_refused(position: Position) -> None:
    with pytest.raises(ValueError, match="out of range"):
        position.pack()


def test_a_word_with_an_unknown_phase_is_refused() -> None:
    with pytest.raises(ValueError, match="15"):
        Position.unpack(0xF << 20)


def test_two_maps_of_a_segment_see_the_same(segment: int) -> None:
    trainer, agent = Header(segment), Header(segment)
    before = agent.valid
    trainer.initialise()
    assert (before, agent.valid) == (False, True)
    assert agent.position == Position(0, Phase.SETUP)
    trainer.position = Position(5, Phase.UPDATE, slot=1, torn=True, chunk=3)
    trainer.epoch = 2
    trainer.last_words = 1.5
    assert agent.position == Position(5, Phase.UPDATE, slot=1, torn=True, chunk=3)
    assert (agent.epoch, agent.last_words) == (2, 1.5)
    trainer.close()
    agent.close()


def test_a_header_outlives_its_writer(segment: int) -> None:
    writer = Header(segment)
    writer.initialise()
    writer.position = Position(9, Phase.VOTE)
    writer.close()
    reader = Header(segment)
    assert reader.position == Position(9, Phase.VOTE)
    reader.close()


def test_collectives_are_counted_by_group(segment: int) -> None:
    trainer, agent = Header(segment), Header(segment)
    trainer.initialise()
    before = agent.signs.progress
    trainer.set_group(0, key_of("default"))
    trainer.set_group(GROUPS - 1, key_of("pairs"))
    trainer.entered(0, 17)
    trainer.entered(0, 18)
    trainer.entered(-1, 19)
    assert agent.groups == {key_of("default"): (2, 18), key_of("pairs"): (0, 0)}
    assert agent.signs.progress != before
    trainer.forget_calls()
    assert (agent.groups, agent.signs.progress) == ({}, before)
    trainer.close()
    agent.close()


def test_the_next_trainer_of_a_slot_begins_with_a_clean_sheet(segment: int) -> None:
    header = Header(segment)
    header.initialise()
    header.position = Position(4, Phase.VOTE)
    header.beat, header.paused, header.waiting, header.thread = 3.0, 4.0, key_of("default"), 17
    header.forget()
    assert (header.beat, header.paused, header.waiting, header.thread) == (0.0, 0.0, 0, 0)
    assert header.position == Position(4, Phase.VOTE)
    header.close()


def test_keys_of_groups_are_numbers_that_a_header_can_hold() -> None:
    keys = {key_of(str(number)) for number in range(1000)}
    assert len(keys) == 1000
    assert all(0 < key < 1 << 63 for key in keys)
