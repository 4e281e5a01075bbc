"""Events as lines for the terminal. Pure: one event in, one line of text out, or None for what is not worth a line."""

from __future__ import annotations

from collections.abc import Callable, Mapping

_Event = Mapping[str, object]


def line(event: _Event) -> str | None:
    """The line of an event, without its newline, or None.

    Example:
        >>> line({"event": "shadow_given_up", "slot": 1, "reason": "3 % of the memory is free"})
        'leto: the shadow of slot 1 was given up: 3 % of the memory is free'
    """
    writer = _WRITERS.get(str(event.get("event")))
    return None if writer is None else f"leto: {writer(event)}"


def _recovery(event: _Event) -> str:
    ranks = event.get("ranks")
    who = _ranks(ranks if isinstance(ranks, list | tuple) and ranks else [event.get("rank")])
    how = {"forward": "rolled forward", "rerun": "step run again"}.get(str(event.get("resolution")), "resumed")
    lost = event.get("lost_steps", 0)
    phases = event.get("phases_ms")
    parts = ", ".join(f"{name} {_ms(value)}" for name, value in phases.items()) if isinstance(phases, dict) else ""
    return (
        f"recovered {who} ({event.get('cause')}) by {event.get('action')}, {how}, {_count(lost, 'step')} lost, "
        f"stalled {_ms(event.get('stall_ms'))} ms{f' ({parts})' if parts else ''}, epoch {event.get('epoch')}"
    )


def _failure(event: _Event) -> str:
    step, phase, detail = event.get("step"), event.get("phase"), event.get("detail")
    where = f" at step {step}{f', {phase}' if phase else ''}" if step is not None else ""
    return (
        f"rank {event.get('rank')} (pid {event.get('pid')}) failed: {event.get('cause')}{where}"
        f"{f': {detail}' if detail else ''}"
    )


def _hang(event: _Event) -> str:
    return (
        f"rank {event.get('rank')} (pid {event.get('pid')}) hangs at step {event.get('step')}: {event.get('reason')}; "
        f"its stacks are in {event.get('stacks')}"
    )


def _unfit(event: _Event) -> str:
    return (
        f"the shadow of slot {event.get('slot')} (rank {event.get('rank')}) cannot stand in: {event.get('reason')}; "
        "a failure of this rank will start a process from nothing"
    )


def _given_up(event: _Event) -> str:
    return f"the shadow of slot {event.get('slot')} was given up: {event.get('reason')}"


def _replaced(event: _Event) -> str:
    return f"rank {event.get('rank')} was replaced after its last step by process {event.get('pid')}"


def _skipped(event: _Event) -> str:
    total = _count(event.get("total"), "step")
    return f"step {event.get('step')} was stepped over: {event.get('reason')} ({total} so far)"


def _restart(event: _Event) -> str:
    return f"restarting all workers: {event.get('reason')}"


def _resumed(event: _Event) -> str:
    return (
        f"going on at step {event.get('step')} with {_count(event.get('slots'), 'rank')}, from the state of this run "
        f"that agent {event.get('agent')} left in {event.get('dir')}"
    )


def _spare(event: _Event) -> str:
    return f"this node waits as a spare with {_count(event.get('slots'), 'slot')}"


def _fenced(event: _Event) -> str:
    return f"the job has gone on without this node, its workers were stopped: {event.get('reason')}"


def _damaged(event: _Event) -> str:
    return f"{event.get('what')} is damaged and not used: {event.get('reason')}"


def _restored(event: _Event) -> str:
    ranks, seconds = event.get("ranks"), event.get("seconds")
    who = _ranks(ranks if isinstance(ranks, list | tuple) else [ranks])
    took = f"{seconds:.2f}" if isinstance(seconds, float) else "?"
    return f"restored the state of {who} at step {event.get('version')} from other nodes in {took} s"


_WRITERS: Mapping[str, Callable[[_Event], str]] = {
    "damaged": _damaged,
    "failure": _failure,
    "fenced": _fenced,
    "hang": _hang,
    "recovery": _recovery,
    "replaced": _replaced,
    "restart": _restart,
    "restored": _restored,
    "resumed": _resumed,
    "shadow_given_up": _given_up,
    "skipped": _skipped,
    "shadow_unfit": _unfit,
    "spare": _spare,
}


def _ranks(ranks: list[object] | tuple[object, ...]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(str(rank) for rank in ranks)}"


def _count(number: object, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _ms(value: object) -> str:
    return f"{value:.0f}" if isinstance(value, int | float) else "?"
