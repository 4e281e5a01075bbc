"""Who may talk to a keeper: both sides show that they have the job's key before anything else is accepted.

    A -> B   Greeting   run id, A's node, nonce a
    B -> A   Challenge  B's node, nonce b, HMAC-SHA256(key, "server", run id, A, B, a, b)
    A -> B   Proof      HMAC-SHA256(key, "client", run id, A, B, a, b)
    B -> A   Admitted

The role is part of what is signed, so neither side's proof can be sent back to it as its own; the nodes are, so it
cannot be passed on to another; both nonces are, so it cannot be used again. The key is made for one job and comes by
the coordinator. Rejected: TLS, whose certificates would have to be made and handed out, for a network that already
carries the same state unencrypted between the ranks.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import NamedTuple

import msgspec

from leto_elastic.protect.frames import ADMITTED, CHALLENGE, GREETING, HANDSHAKE, PROOF, Connection, ProtocolError
from leto_elastic.protect.messages import NONCE_BYTES, Admitted, Challenge, Greeting, Proof

KEY_BYTES = 32


class WrongNode(ProtocolError):
    """A keeper of the same job answers at that address, but it is another node."""


class Identity(NamedTuple):
    """Who this keeper is, the key that it shares with the others of the job, and its patience.

    `deadline`: seconds for a connection to be made, and for all that is exchanged here.
    """

    run_id: str
    node: str
    key: bytes
    deadline: float = 5.0


def introduce(connection: Connection, me: Identity, node: str) -> None:
    """The side that connects, and wants to speak with `node`.

    Raises ProtocolError (a wrong key, something else than a keeper), WrongNode, Closed or OSError.
    """
    connection.within(me.deadline)
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.send(HANDSHAKE, Greeting(me.run_id, me.node, nonce))
    challenge, _ = connection.receive(CHALLENGE)
    nonces = (nonce, challenge.nonce)
    if not hmac.compare_digest(challenge.proof, _proof(me, "server", me.node, challenge.node, nonces)):
        raise ProtocolError("it does not have the key of this job")
    if challenge.node != node:
        raise WrongNode(f"it is node {challenge.node}, not {node}")
    connection.send(HANDSHAKE, Proof(_proof(me, "client", me.node, challenge.node, nonces)))
    connection.receive(ADMITTED)
    connection.within(None)


def admit(connection: Connection, me: Identity) -> str:
    """The side that listens. Returns the node that has connected.

    Raises ProtocolError (a wrong key or run, something else than a keeper), Closed or OSError.
    """
    connection.within(me.deadline)
    greeting, _ = connection.receive(GREETING)
    if greeting.run_id != me.run_id:
        raise ProtocolError(f"it belongs to the run {greeting.run_id!r}")
    nonces = (greeting.nonce, secrets.token_bytes(NONCE_BYTES))
    proof = _proof(me, "server", greeting.node, me.node, nonces)
    connection.send(HANDSHAKE, Challenge(me.node, nonces[1], proof))
    answer, _ = connection.receive(PROOF)
    if not hmac.compare_digest(answer.proof, _proof(me, "client", greeting.node, me.node, nonces)):
        raise ProtocolError("it does not have the key of this job")
    connection.send(HANDSHAKE, Admitted())
    connection.within(None)
    return str(greeting.node)


def _proof(me: Identity, role: str, client: str, server: str, nonces: tuple[bytes, bytes]) -> bytes:
    signed = msgspec.msgpack.encode(["leto-keeper-1", role, me.run_id, client, server, *nonces])
    return hmac.new(me.key, signed, hashlib.sha256).digest()
