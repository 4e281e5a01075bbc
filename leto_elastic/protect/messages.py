"""What keepers say to each other: the typed headers of their frames.

A request gets exactly one answer, in order, but for `ReadPiece` and `ReadUnit`, which get `Data` frames up to an
`End`. `Refused` may take the place of any answer and leaves the connection as it was. Requests carry the epoch of the
plan that the sender acts under: a receiver that has not heard of it yet waits for it, as long as its deadline says.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

CHUNK = 1 << 20  # bytes of the payload of Chunk and Data, at most; what is coded and sent at a time
COPY_MAX = 1 << 28  # bytes of one small copy
NONCE_BYTES = 32

Kind = Literal["record", "manifest", "extras", "sums"]
Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Tag = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 62)]
Crc = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Secret = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the tag on the wire is the class name."""


# ---- the handshake, see `leto_elastic.protect.handshake`


class Greeting(Message, frozen=True):
    """From the one that connects."""

    run_id: Name
    node: Name
    nonce: Secret


class Challenge(Message, frozen=True):
    """From the one that listens; `proof` shows that it has the key."""

    node: Name
    nonce: Secret
    proof: Secret


class Proof(Message, frozen=True):
    """From the one that connects: it has the key too."""

    proof: Secret


class Admitted(Message, frozen=True):
    """From the one that listens: requests may follow."""


# ---- requests


class Bye(Message, frozen=True):
    """The sender's keeper is about to close: the end of its connections will not mean that it died."""


class Put(Message, frozen=True):
    """Payload: a small copy. Extras with a tag, and sums, belong to that protected version. Answer: `Done`."""

    epoch: Natural
    rank: Natural
    kind: Kind
    version: Natural
    tag: Tag
    agreed: Tag


class Begin(Message, frozen=True):
    """Unit `unit` of a stripe, `length` bytes of version `tag`, is about to come. Answer: `Go`."""

    epoch: Natural
    tag: Natural
    agreed: Tag
    stripe: Natural
    piece: Natural
    unit: Natural
    length: Natural


class Chunk(Message, frozen=True):
    """Payload: bytes of a unit from `offset` on. Answer: `Done`."""

    epoch: Natural
    tag: Natural
    stripe: Natural
    piece: Natural
    unit: Natural
    offset: Natural


class Finish(Message, frozen=True):
    """All of a unit was sent, and its bytes have this CRC-32. Answer: `Done`."""

    epoch: Natural
    tag: Natural
    stripe: Natural
    piece: Natural
    unit: Natural
    crc: Crc


class Fetch(Message, frozen=True):
    """Ask for a small copy; with a tag for what belongs to a protected version. Answer: `Copy`."""

    epoch: Natural
    rank: Natural
    kind: Kind
    version: Natural
    tag: Tag


class ReadPiece(Message, frozen=True):
    """Ask for the first `length` bytes of a parity piece, or all if it has fewer."""

    epoch: Natural
    tag: Natural
    stripe: Natural
    piece: Natural
    length: Natural


class ReadUnit(Message, frozen=True):
    """Ask for the first `length` bytes of part `part` of a rank's stream, cut into `parts`, at `version`.

    With a tag, only if they match the sums of that protected version.
    """

    epoch: Natural
    rank: Natural
    version: Natural
    tag: Tag
    part: Natural
    parts: Annotated[int, msgspec.Meta(ge=1, le=255)]
    length: Natural


# ---- answers


class Done(Message, frozen=True):
    """It is done."""


class Go(Message, frozen=True):
    """Send the unit from `offset` on: what is before it was received over an earlier connection."""

    offset: Natural


class Copy(Message, frozen=True):
    """Payload: the small copy that was asked for."""


class Data(Message, frozen=True):
    """Payload: the bytes from `offset` on."""

    offset: Natural


class End(Message, frozen=True):
    """Nothing more; all that was sent, together, has this CRC-32."""

    length: Natural
    crc: Crc


class Refused(Message, frozen=True):
    """Nothing was changed."""

    reason: Annotated[str, msgspec.Meta(max_length=2048)]


Request = Bye | Put | Begin | Chunk | Finish | Fetch | ReadPiece | ReadUnit
Answer = Done | Go | Copy | Data | End | Refused

PAYLOADS: dict[type[Message], int] = {Put: COPY_MAX, Copy: COPY_MAX, Chunk: CHUNK, Data: CHUNK}  # the others have none
