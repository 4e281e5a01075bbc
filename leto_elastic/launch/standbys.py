"""Which standby processes are to be started or given up. Pure, over the slots of a node."""

from __future__ import annotations

from collections.abc import Sequence

from leto_elastic.launch.actions import Action, Emit, Kill, Spawn, how
from leto_elastic.launch.slots import Member, Slot

QUICK_DEATHS = 3
"""So many shadows of a slot in a row that die before they are ready, and no further one is started."""


def for_trainers(slots: Sequence[Slot]) -> list[Action]:
    """Shadows for the trainers that have none."""
    wanted = [slot for slot in slots if slot.trainer is not None and slot.record is not None and not slot.unfit]
    return _start(wanted)


def for_spare(slots: Sequence[Slot]) -> list[Action]:
    """Processes that have run the script up to `leto.init()`, and there wait for a rank."""
    return _start(slots)


def _start(slots: Sequence[Slot]) -> list[Action]:
    actions: list[Action] = []
    for slot in slots:
        if slot.standby is None and not slot.spawning and slot.quick_deaths < QUICK_DEATHS:
            slot.spawning = True
            actions.append(Spawn(slot.index, "shadow"))
    return actions


def give_up(slots: Sequence[Slot], short: str, *, first: bool) -> list[Action]:
    """Kill the idle ones, whose trainers live, because memory is short; told only the first time."""
    actions: list[Action] = []
    for slot in slots:
        if slot.standby is not None and slot.trainer is not None:
            if first:
                actions.append(Emit("shadow_given_up", {"slot": slot.index, "reason": short}))
            slot.standby.dismissed = True
            actions.append(Kill(slot.standby.key))
    return actions


def died(slot: Slot, member: Member, code: int) -> list[Action]:
    """An idle one ended; whether another one would do so too."""
    if member.ready or member.dismissed or slot.unfit:
        return []
    slot.quick_deaths += 1
    if slot.quick_deaths != QUICK_DEATHS:
        return []
    reason = f"it died {QUICK_DEATHS} times in a row before it was ready, see its log; last: {how(code)}"
    return [Emit("shadow_given_up", {"slot": slot.index, "reason": reason})]
