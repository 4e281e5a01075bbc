"""Gradients that are not finite: found before they are applied, and decided upon by all ranks alike.

With FSDP2 each rank sees its own shards only, so what one rank finds must reach all of them before any has changed
anything. It travels in the vote, whose result is the lowest of all ballots: a rank with such gradients votes lower than
anything else could. Those who skip the step then do not enter its update by this vote. They first forget the gradients
that they have kept for it, and vote again; so whoever is ahead of a rank that dies in between has not applied
anything, and its replacement finds nothing to apply.

Not done unless the policy asks for it: one more pass over the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from leto_elastic.errors import NotFinite
from leto_elastic.state.retained import Retained
from leto_elastic.state.transaction import Transaction
from leto_elastic.worker.protection import Protection
from leto_elastic.worker.session import Session

NOT_FINITE = -(1 << 40)
"""The highest ballot of a rank whose gradients are not finite: less its rank. Below all of `Protection.ballot`."""


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all elements are finite numbers.

    A sum is finite only if all that it is of is, and takes a fraction of the time of an exact way (3.3 million float32,
    one thread: 1.6 ms; `_foreach_norm` 2.1, or 12 for the largest magnitude). It may overflow without any of them, so
    one that is not finite is looked into.
    """
    if not tensors:
        return True
    if math.isfinite(torch.stack([tensor.sum().double() for tensor in tensors]).sum().item()):
        return True
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def vote(
    session: Session, retained: Retained, transaction: Transaction, protection: Protection, *, guarded: bool
) -> tuple[int | None, str]:
    """The vote of a step: its result as `Fabric.vote` has it, and why nothing is to be applied, if so.

    Args:
        guarded: gradients are kept, for which the policy may want the check.

    Raises NotFinite when the policy is to fail.
    """
    ballot, mode = protection.ballot(transaction.fresh), session.policy.step.nonfinite
    if guarded and mode != "allow":
        ballot = check(retained, session.rank, ballot)
    lowest = session.fabric.vote(ballot)
    if lowest is None or lowest > NOT_FINITE:
        return lowest, ""
    refused = told(retained, session.rank, lowest)
    if mode == "fail":
        raise NotFinite(f"step {retained.header.position.step}: {refused} (step.nonfinite is fail)")
    transaction.save_gradients(apply=False)
    return session.fabric.vote(protection.ballot(transaction.fresh)), refused


def check(retained: Retained, rank: int, otherwise: int) -> int:
    """What a rank votes: `otherwise` unless a gradient that it has kept for the update is not finite."""
    kept = [grad for grad, there in zip(retained.gradients, retained.gradient_mask, strict=True) if there]
    return otherwise if all_finite(kept) else NOT_FINITE - rank


def told(retained: Retained, rank: int, lowest: int) -> str:
    """What such a vote says, for a human; with the name of a parameter where it was found."""
    culprit = NOT_FINITE - lowest
    if culprit != rank:
        return f"gradients of rank {culprit} are not finite"
    kept = zip(retained.gradients, retained.gradient_mask, retained.sites, strict=False)
    names = [site.name for grad, there, site in kept if there and not all_finite([grad])]
    return f"gradients of rank {rank} are not finite: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
