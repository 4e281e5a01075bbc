"""Processes that hold an exception instead of ending by it, until a plan says what becomes of their ranks."""

from __future__ import annotations

from leto_elastic.launch.actions import Action, Surrender
from leto_elastic.launch.slots import Member


def surrender(member: Member) -> list[Action]:
    """Have it end by its exception; nothing when it was told so before."""
    if member.surrendered:
        return []
    member.surrendered = True
    return [Surrender(member.key)]


def goes_on(member: Member, epoch: int) -> None:
    """A trainer is given the plan of `epoch`, to go on with; what it held is forgotten."""
    member.planned, member.parked = epoch, False
    if member.held:
        member.held = member.oom = False
        member.failing = None
