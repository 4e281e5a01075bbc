"""Messages between an agent and the processes of its node.

One `AF_UNIX` `SOCK_SEQPACKET` connection a process, in a directory only the owner may enter. A datagram is one msgpack
message; file descriptors travel beside it by `SCM_RIGHTS`. A datagram is bounded by the socket buffer, so whatever may
grow (a set-up record, a manifest) goes into a memfd and its descriptor is sent. End of file in either direction means
that the other side is gone.

Times are `time.monotonic()` seconds, which all processes of one host share.
"""

from __future__ import annotations

import socket

import msgspec

from leto_elastic.errors import LetoError

MAX_MESSAGE = 65536
MAX_FDS = 64


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the tag on the wire is the class name."""


# ---- from a worker (trainer or shadow) to its agent


class Hello(Message, frozen=True):
    """First message of a process; `token` is `LETO_TOKEN` of its environment."""

    token: str
    pid: int


class Alloc(Message, frozen=True):
    """Ask for a zeroed, reserved segment. Answer: `Segment` with one fd, or `Refused`."""

    name: str
    size: int


class SetupRecord(Message, frozen=True):
    """One fd: what a shadow of this slot needs to replay the set-up (sent once, before the first step)."""

    size: int


class Manifest(Message, frozen=True):
    """One fd: the layout of this trainer's segments, replacing the one before.

    Sent right after the first commit, when it makes the slot *protected*, and whenever segments are added.
    """

    version: int
    size: int


class Committed(Message, frozen=True):
    """First commit of this rank in `epoch` (also epoch 0); `marks` are named instants of its recovery, monotonic s."""

    epoch: int
    step: int
    resolution: str  # "start", "forward" or "rerun"
    marks: dict[str, float]


class Suspect(Message, frozen=True):
    """A collective of `epoch` failed here although no abort was announced."""

    epoch: int
    reason: str


class Rehearsed(Message, frozen=True):
    """A shadow has rehearsed. Answer, as soon as the slot is protected: `Attach`."""


class Ready(Message, frozen=True):
    """A shadow is attached and parked."""


class Unfit(Message, frozen=True):
    """A shadow cannot stand in for its trainer; it ends itself after this message."""

    reason: str


class Stepped(Message, frozen=True):
    """This rank has committed: X(`step`) is in buffer `slot` of the extras. Only sent in a job of several nodes."""

    step: int
    slot: int


class Due(Message, frozen=True):
    """Protect version `step` (see `header.tag_of`): it is in W until VOTE(step) when `buffer` is -1, else in that
    snapshot buffer until the version is agreed or given up.

    X(`step`) is in buffer `slot` of the extras, or behind the stream in the snapshot buffer.
    """

    step: int
    generation: int
    slot: int
    buffer: int


class Parked(Message, frozen=True):
    """This trainer has left `epoch`, which failed, and waits for a plan: its header does not move any more."""

    epoch: int


class Finished(Message, frozen=True):
    """Every rank has committed the last step; this process has left `leto.steps`."""

    step: int


class Failing(Message, frozen=True):
    """This process is about to end by an exception (after its traceback was recorded); `oom`: for want of memory."""

    step: int
    reason: str
    oom: bool = False


class Raised(Message, frozen=True):
    """An exception left the body of `step` before its vote, and this process holds it, its state untouched.

    It has given up `epoch` and waits: for `Plan`, to run the step again, or for `Surrender`, to end by the exception.
    `oom`: one that tells of want of memory.
    """

    step: int
    epoch: int
    reason: str
    oom: bool = False


class Quitting(Message, frozen=True):
    """This process is about to end in a way that is the script's own decision, or must not be repaired."""

    step: int
    reason: str


class Skipped(Message, frozen=True):
    """This rank has committed `step` without an update, and why."""

    step: int
    reason: str


# ---- from an agent to a worker


class StoreAddress(msgspec.Struct, frozen=True):
    """Where the c10d TCPStore of one epoch listens. `port` 0: none."""

    host: str
    port: int


class Welcome(Message, frozen=True):
    """Answer to `Hello`. For a shadow one fd comes along: the set-up record of its trainer."""

    role: str  # "trainer" or "shadow"
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    slot: int
    epoch: int
    run_id: str
    run_dir: str
    store: StoreAddress
    policy: bytes  # leto_elastic.recovery.policy.Policy, msgpack
    address: str = ""  # of this node, for the communicators; "": as gloo finds it (loopback when the store is there)
    protect: int = 0  # the snapshot buffers that a trainer keeps; 0: no protection against lost memory
    every: int = 1  # steps from one protected version to the next
    generation: int = 0  # see `leto_elastic.state.header.tag_of`


class Segment(Message, frozen=True):
    """Answer to `Alloc`: one fd."""

    name: str
    size: int


class Refused(Message, frozen=True):
    """Answer to `Alloc`: not possible, and why (numbers included)."""

    reason: str


class Attach(Message, frozen=True):
    """Fds: the manifest first, then the segments in the order of `names`."""

    version: int
    manifest_size: int
    names: list[str]
    sizes: list[int]


class Abort(Message, frozen=True):
    """A failure ended `epoch`: wake whoever is blocked in it and wait for `Plan`."""

    epoch: int


class Plan(Message, frozen=True):
    """Join `epoch`. For a survivor; its header may have been put back to an earlier version meanwhile."""

    epoch: int
    store: StoreAddress
    generation: int = 0
    skip: int = -1  # the step to step over, if it is not done yet; -1: none


class Surrender(Message, frozen=True):
    """To a process that holds an exception: end by it."""


class Prepare(Message, frozen=True):
    """To a parked shadow: its trainer is dead, and a `Promote` will follow once that is decided. Read the state."""


class Promote(Message, frozen=True):
    """Become the slot's trainer in `epoch`. Fds: stdout, stderr of the trainer.

    A store with port 0: the training is over, only what follows the loop is to be done, without communicators. If
    `version` is newer than what the shadow attached, an `Attach` precedes this message.
    """

    epoch: int
    version: int
    store: StoreAddress
    generation: int = 0
    skip: int = -1  # as in `Plan`


class Release(Message, frozen=True):
    """Every rank has committed the last step, though a worker died since: leave `leto.steps` without another epoch."""


class Stop(Message, frozen=True):
    """End now."""

    reason: str


FromWorker = (
    Hello
    | Alloc
    | SetupRecord
    | Manifest
    | Committed
    | Stepped
    | Due
    | Parked
    | Suspect
    | Rehearsed
    | Ready
    | Unfit
    | Finished
    | Failing
    | Raised
    | Quitting
    | Skipped
)
FromAgent = Welcome | Segment | Refused | Attach | Abort | Plan | Surrender | Prepare | Promote | Release | Stop

_encoder = msgspec.msgpack.Encoder()
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_from_agent: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)


def send(sock: socket.socket, message: Message, fds: list[int] | None = None) -> None:
    """Send one message, with descriptors. Raises OSError when the other side is gone."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE:
        raise LetoError(f"message {type(message).__name__} of {len(data)} bytes is over {MAX_MESSAGE}")
    socket.send_fds(sock, [data], fds or [])


def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    data, fds, flags, _ = socket.recv_fds(sock, MAX_MESSAGE, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    if not data:
        raise EOFError("the other side closed its connection")
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise LetoError("a truncated message arrived")
    return data, list(fds)


def receive_from_worker(sock: socket.socket) -> tuple[FromWorker, list[int]]:
    """One message of a worker. Raises EOFError at its end, BlockingIOError when there is none yet."""
    data, fds = _receive(sock)
    return _from_worker.decode(data), fds


def receive_from_agent(sock: socket.socket) -> tuple[FromAgent, list[int]]:
    """One message of the agent. Raises EOFError when the agent is gone."""
    data, fds = _receive(sock)
    return _from_agent.decode(data), fds
