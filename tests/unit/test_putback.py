"""Segments are brought to a version: their bytes and the header's words, after an update that was cut off anywhere.

What a trainer does is done here by hand, so that only the layout is shared with what is tested. Bytes of a snapshot
buffer that the trainer has not kept are garbage.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import msgspec
import pytest

from leto_elastic.errors import StateError
from leto_elastic.protect import putback
from leto_elastic.protect.mapped import Slot
from leto_elastic.state.header import NO_TAG, Phase, Position, tag_of
from leto_elastic.state.layout import Chunk, Place
from tests.unit.keeper_rig import EXTRAS, Rank

STEP = 7
TAG, OLD = tag_of(STEP, 2), tag_of(STEP - 3, 2)
SIZE = 3000  # bytes of the stream: 1000 in each of its three ranges
CHUNKS = [
    Chunk(0, 0, 2, [Place("weights", 64, 300), Place("optim", 0, 500)]),
    Chunk(0, 2, 3, [Place("weights", 364, 600)]),
    Chunk(1, 3, 4, [Place("weights", 1128, 1000), Place("optim", 512, 488)]),
]
"""Between them lie bytes of the stream that no chunk touches: weights 964 to 1064, optim 500 to 512."""


class Cut(Rank):
    """A rank whose trainer is cut off in the middle of something."""

    def __init__(self, chunks: Sequence[Chunk] = CHUNKS, buffers: int = 2) -> None:
        super().__init__(SIZE, seed=1, buffers=buffers)
        self.manifest = msgspec.structs.replace(self.manifest, chunks=list(chunks))
        for slot in range(3):
            self.write_extras(slot, f"X in slot {slot}".encode())
        for buffer in range(buffers):
            os.pwrite(self.fds[f"snapshot-{buffer}"], b"\xee" * (SIZE + EXTRAS), 0)
        self.slot = Slot(self.manifest, self.fds)
        self.header.sent, self.header.agreed = TAG, OLD

    def content(self) -> dict[str, bytes]:
        return {name: os.pread(fd, os.fstat(fd).st_size, 0) for name, fd in self.fds.items() if name != "header"}

    def keep(self, buffer: int, place: Place) -> None:
        """A range of a segment is copied to where it lies in the stream."""
        start = {"weights": -64, "optim": 2000}[place.segment] - (64 if place.offset >= 1128 else 0)
        data = os.pread(self.fds[place.segment], place.size, place.offset)
        os.pwrite(self.fds[f"snapshot-{buffer}"], data, place.offset + start)

    def overwrite(self, place: Place, size: int) -> None:
        os.pwrite(self.fds[place.segment], b"\xaa" * size, place.offset)

    def update(self, buffer: int, done: int, torn: bool, slot: int = 1) -> None:
        """An update of STEP that keeps its snapshot has done so many chunks, and half of the next one."""
        header = self.header
        header.set_buffer(buffer, NO_TAG)
        header.target = (TAG, buffer)
        for still in (Place("weights", 964, 100), Place("optim", 500, 12)):
            self.keep(buffer, still)
        for number in range(done + torn):
            for place in self.manifest.chunks[number].ranges if number < len(CHUNKS) else []:
                self.keep(buffer, place)
                self.overwrite(place, place.size if number < done else place.size // 2)
        header.position = Position(STEP, Phase.UPDATE, slot=slot, torn=torn, chunk=done)

    def words(self) -> tuple[Position, int, int, tuple[int, int], int]:
        """position, sent, agreed, buffers, tag of target."""
        header = self.slot.header
        return header.position, header.sent, header.agreed, header.buffers, header.target[0]


@pytest.fixture
def cut() -> Iterator[Cut]:
    rank = Cut()
    yield rank
    rank.close()


# ---- from the pre-images of the running update


@pytest.mark.parametrize("buffer", [0, 1])
@pytest.mark.parametrize("torn", [False, True], ids=["between", "torn"])
@pytest.mark.parametrize("done", range(4))
def test_an_update_is_undone_wherever_it_was_cut_off(cut: Cut, done: int, torn: bool, buffer: int) -> None:
    cut.header.set_buffer(1 - buffer, OLD)
    before = cut.content()
    cut.update(buffer, done, torn)
    kept = cut.content()
    putback.put_back(cut.slot, STEP, "undo")
    after = cut.content()
    assert {name: after[name] for name in ("weights", "optim", "extras")} == {
        name: before[name] for name in ("weights", "optim", "extras")
    }, "all of it, what is not in the stream included"
    assert [after[name] for name in cut.manifest.snapshots] == [kept[name] for name in cut.manifest.snapshots]
    buffers = (OLD, NO_TAG) if buffer else (NO_TAG, OLD)
    assert cut.words() == (Position(STEP, Phase.COMPUTE, slot=1), NO_TAG, OLD, buffers, NO_TAG)
    assert cut.slot.extras(-1, 1) == b"X in slot 1"


def test_an_update_that_has_not_touched_anything_is_undone_by_the_header_alone(cut: Cut) -> None:
    before = cut.get()
    cut.update(0, 0, torn=False)
    os.pwrite(cut.fds["snapshot-0"], b"\xee" * SIZE, 0)
    putback.put_back(cut.slot, STEP, "undo")
    assert cut.get() == before


@pytest.mark.parametrize("torn", [False, True])
def test_an_optimizer_that_has_no_chunks_is_undone_as_a_whole(torn: bool) -> None:
    cut = Cut(chunks=[])
    before = cut.get()
    cut.update(0, 0, torn=False)
    for place in cut.stream:
        cut.keep(0, place)
    if torn:
        for place in cut.stream:
            cut.overwrite(place, place.size // 2)
    cut.header.position = Position(STEP, Phase.UPDATE, slot=1, torn=torn)
    putback.put_back(cut.slot, STEP, "undo")
    assert cut.get() == before
    cut.close()


def test_a_snapshot_that_is_whole_stays_so(cut: Cut) -> None:
    """The last chunk is done, the step is not committed."""
    before = cut.get()
    cut.update(1, len(CHUNKS), torn=False)
    cut.header.set_buffer(1, TAG)
    putback.put_back(cut.slot, STEP, "undo")
    assert cut.get() == before
    assert cut.words() == (Position(STEP, Phase.COMPUTE, slot=1), NO_TAG, OLD, (NO_TAG, TAG), NO_TAG)


def test_what_cannot_be_undone(cut: Cut) -> None:
    cut.update(0, 1, torn=True)
    words, content = cut.words(), cut.content()
    with pytest.raises(StateError, match=f"no pre-images of version {STEP - 1} are kept at .*step={STEP}"):
        putback.put_back(cut.slot, STEP - 1, "undo")
    cut.header.target = (tag_of(STEP - 1, 2), 0)  # of another step
    with pytest.raises(StateError, match="no pre-images"):
        putback.put_back(cut.slot, STEP, "undo")
    cut.header.target = (NO_TAG, 0)  # an update that keeps none
    with pytest.raises(StateError, match="no pre-images"):
        putback.put_back(cut.slot, STEP, "undo")
    cut.header.target = (TAG, 0)
    assert (cut.words(), cut.content()) == (words, content), "nothing has been changed"


# ---- from a snapshot buffer

WHOLE = bytes(range(250)) * 12


@pytest.mark.parametrize("buffer", [0, 1])
@pytest.mark.parametrize("slot", [0, 1, 2])
@pytest.mark.parametrize("phase", [Phase.COMPUTE, Phase.VOTE, Phase.UPDATE, Phase.SECTION])
def test_a_buffer_is_put_back_wherever_the_rank_stands(cut: Cut, phase: Phase, slot: int, buffer: int) -> None:
    cut.write_snapshot(buffer, WHOLE, b"X of then")
    cut.header.set_buffer(buffer, OLD)
    if phase is Phase.UPDATE:
        cut.update(1 - buffer, 1, torn=True, slot=slot)
    cut.header.position = Position(STEP, phase, slot=slot)
    before = cut.content()
    putback.put_back(cut.slot, STEP - 3, f"buffer {buffer}")
    after = cut.content()
    assert cut.get() == WHOLE
    assert after["weights"][:64] == before["weights"][:64], "what is not in the stream stays"
    assert after["weights"][1064:1128] == before["weights"][1064:1128]
    assert [after[name] for name in cut.manifest.snapshots] == [before[name] for name in cut.manifest.snapshots]
    free = (slot + 1) % 3
    buffers = (NO_TAG, OLD) if buffer else (OLD, NO_TAG)
    assert cut.words() == (Position(STEP - 3, Phase.COMPUTE, slot=free), NO_TAG, OLD, buffers, NO_TAG)
    extras = [cut.slot.extras(-1, index) for index in range(3)]
    assert extras[free] == b"X of then"
    assert extras[slot] == f"X in slot {slot}".encode(), "the X that was the newest is not overwritten"


def test_the_only_buffer() -> None:
    one = Cut(buffers=1)
    one.write_snapshot(0, WHOLE, b"X")
    one.header.set_buffer(0, OLD)
    putback.put_back(one.slot, STEP - 3, "buffer 0")
    assert one.get() == WHOLE
    with pytest.raises(StateError, match="snapshot buffer 1 does not hold version 4"):
        putback.put_back(one.slot, STEP - 3, "buffer 1")
    one.close()


def test_going_back_forgets_what_was_newer(cut: Cut) -> None:
    cut.write_snapshot(0, WHOLE, b"X")
    cut.header.set_buffer(0, OLD)
    cut.header.set_buffer(1, TAG)
    cut.header.agreed = TAG
    cut.header.position = Position(STEP + 1, Phase.VOTE)
    putback.put_back(cut.slot, STEP - 3, "buffer 0")
    assert cut.words()[1:] == (NO_TAG, NO_TAG, (OLD, NO_TAG), NO_TAG)


def test_a_buffer_that_holds_something_else(cut: Cut) -> None:
    cut.write_snapshot(0, WHOLE, b"X")
    cut.header.set_buffer(0, TAG)
    words, content = cut.words(), cut.content()
    with pytest.raises(StateError, match="snapshot buffer 0 does not hold version 4"):
        putback.put_back(cut.slot, STEP - 3, "buffer 0")
    with pytest.raises(StateError, match="snapshot buffer 1 does not hold version 7"):
        putback.put_back(cut.slot, STEP, "buffer 1")
    assert (cut.words(), cut.content()) == (words, content), "nothing has been changed"


def test_a_buffer_whose_extras_are_damaged_leaves_the_header_where_it_was(cut: Cut) -> None:
    cut.write_snapshot(0, WHOLE, b"X")
    os.pwrite(cut.fds["snapshot-0"], b"Y", -(-SIZE // 64) * 64 + 16)
    cut.header.set_buffer(0, OLD)
    cut.header.position = Position(STEP, Phase.VOTE)
    words = cut.words()
    with pytest.raises(StateError, match="do not match their checksum"):
        putback.put_back(cut.slot, STEP - 3, "buffer 0")
    assert cut.words() == words, "nobody may take this for version 4"


# ---- the words alone


@pytest.mark.parametrize(
    ("agreed", "buffers", "after"),
    [
        (OLD, (OLD, NO_TAG), (OLD, (OLD, NO_TAG))),
        (TAG, (OLD, TAG), (TAG, (OLD, TAG))),  # of this very version
        (tag_of(STEP, 9), (NO_TAG, NO_TAG), (tag_of(STEP, 9), (NO_TAG, NO_TAG))),  # and of any generation
        (tag_of(STEP + 1, 0), (TAG, tag_of(STEP + 1, 0)), (NO_TAG, (TAG, NO_TAG))),
        (OLD, (tag_of(STEP + 9, 2), OLD), (OLD, (NO_TAG, OLD))),
        (NO_TAG, (NO_TAG, NO_TAG), (NO_TAG, (NO_TAG, NO_TAG))),
    ],
)
def test_what_is_newer_is_forgotten(
    cut: Cut, agreed: int, buffers: tuple[int, int], after: tuple[int, tuple[int, int]]
) -> None:
    position = Position(STEP, Phase.VOTE, slot=2)
    cut.header.position, cut.header.agreed, cut.header.target = position, agreed, (tag_of(STEP, 2), 1)
    for index, tag in enumerate(buffers):
        cut.header.set_buffer(index, tag)
    content = cut.content()
    putback.forget_after(cut.slot, STEP)
    assert cut.words() == (position, NO_TAG, *after, NO_TAG)
    assert cut.content() == content


# ---- holding what is there


def test_what_is_there_is_kept_in_a_buffer_as_protected(cut: Cut) -> None:
    cut.header.position = Position(STEP, Phase.COMPUTE, slot=2)
    putback.keep(cut.slot, TAG)
    assert cut.slot.header.buffers == (TAG, NO_TAG)
    assert cut.slot.header.agreed == TAG
    before = cut.get()
    cut.put(bytes(SIZE))  # training goes on, and comes back
    putback.put_back(cut.slot, STEP, "buffer 0")
    assert cut.get() == before
    assert cut.slot.extras(-1, 0) == b"X in slot 2"


@pytest.mark.parametrize("buffer", [0, 1])
def test_a_buffer_that_holds_it_already_is_only_renamed(cut: Cut, buffer: int) -> None:
    cut.write_snapshot(buffer, WHOLE, b"X")
    cut.header.set_buffer(buffer, TAG)
    cut.header.set_buffer(1 - buffer, OLD)
    cut.header.position = Position(STEP, Phase.COMPUTE)
    content = cut.content()
    again = tag_of(STEP, 5)
    putback.keep(cut.slot, again)
    assert cut.content() == content
    assert cut.slot.header.buffers == ((OLD, again) if buffer else (again, OLD))
    assert cut.slot.header.agreed == again


def test_the_other_buffer_stays_as_it_is(cut: Cut) -> None:
    cut.header.set_buffer(0, OLD)
    cut.header.set_buffer(1, tag_of(STEP - 1, 2))
    cut.header.position = Position(STEP, Phase.COMPUTE)
    before = cut.content()["snapshot-1"]
    putback.keep(cut.slot, TAG)
    assert cut.slot.header.buffers == (TAG, tag_of(STEP - 1, 2))
    assert cut.content()["snapshot-1"] == before


def test_where_there_are_no_buffers_nothing_is_held() -> None:
    cut = Cut(buffers=0)
    cut.header.position = Position(STEP, Phase.COMPUTE)
    words = cut.words()
    putback.keep(cut.slot, TAG)
    assert cut.words() == words
    cut.close()


# ---- memory that is new


def test_a_slot_that_was_written_from_elsewhere_begins_at_its_version(cut: Cut) -> None:
    new = Cut()
    new.header.initialise()
    new.put(cut.get())
    putback.begin(new.slot, STEP, b"X from its keepers")
    assert new.words() == (Position(STEP, Phase.SECTION, slot=0), NO_TAG, NO_TAG, (NO_TAG, NO_TAG), NO_TAG)
    assert new.slot.extras(-1, 0) == b"X from its keepers"
    assert new.get() == cut.get()
    putback.keep(new.slot, TAG)
    assert new.slot.extras(0, 0) == b"X from its keepers"
    assert os.pread(new.fds["snapshot-0"], SIZE, 0) == cut.get()
    new.close()


def test_extras_that_do_not_fit_are_refused_before_the_header_says_anything(cut: Cut) -> None:
    cut.header.position = Position(0, Phase.SETUP)
    putback.begin(cut.slot, STEP, bytes(EXTRAS - 16))
    cut.header.position = Position(0, Phase.SETUP)
    with pytest.raises(StateError, match="do not fit"):
        putback.begin(cut.slot, STEP, bytes(EXTRAS - 15))
    assert cut.slot.header.position == Position(0, Phase.SETUP)
