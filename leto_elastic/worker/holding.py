"""An exception of a step's body: whose it is, and what becomes of it.

It is a *consequence* of a failure elsewhere when a collective of this process was lost in this epoch before it came
(what was computed since is garbage), or when it tells of nothing but that. Any other is this rank's own, also when the
epoch has been given up meanwhile: everything that led to it was whole.

An own exception that comes before the vote, when nothing of the state has changed, is *held* if the policy has `retry`
for its class: the process gives the epoch up, as if it had died, and waits where the exception was raised. With a plan
it joins the next epoch like a survivor, and runs the step again. Told to surrender, or with nobody left to tell it
anything, it lets the exception go on from where it came, so that traceback, exit code and torch's error file are those
of a run without leto.

Rejected: to raise it again from where the plan is awaited, which would put leto's frames into the traceback.
"""

from __future__ import annotations

import logging

from leto_elastic import wire
from leto_elastic.errors import CommunicatorLost, LetoError
from leto_elastic.recovery.policy import Action, FailureClass
from leto_elastic.worker.memory import is_out_of_memory
from leto_elastic.worker.reports import reason_of
from leto_elastic.worker.session import Session
from leto_elastic.worker.step import StepLost

log = logging.getLogger(__name__)


def is_consequence(session: Session, error: BaseException) -> bool:
    """Whether an exception of the body only says that a failure elsewhere has ended the epoch."""
    fabric = session.fabric
    if isinstance(error, StepLost):
        return True
    return fabric.poisoned and isinstance(error, Exception) and (fabric.spoiled or isinstance(error, CommunicatorLost))


def may_hold(session: Session, error: BaseException) -> bool:
    """Whether the policy would ever have the step run again by the process that raised this."""
    cause = FailureClass.OOM if is_out_of_memory(error) else FailureClass.EXCEPTION
    return isinstance(error, Exception) and Action.RETRY in session.policy.classes[cause]


def hold(session: Session, step: int, error: BaseException) -> wire.Plan | None:
    """Wait for what becomes of it: the plan to go on with, or None when the exception is to be raised."""
    fabric, link = session.fabric, session.link
    epoch, reason = fabric.epoch, reason_of(error)
    link.holding = True
    try:
        link.send(wire.Raised(step=step, epoch=epoch, reason=reason, oom=is_out_of_memory(error)))
        fabric.abort(epoch, f"this rank raised {reason}")
        session.mark("abort")
        link.send(wire.Parked(epoch=epoch))
        patience = session.policy.deadlines.until_plan(several=bool(session.welcome.address))
        while True:
            message = link.wait((wire.Plan, wire.Surrender), patience, f"a plan after {reason}").message
            if not isinstance(message, wire.Plan):
                return None
            if message.epoch > epoch:
                log.warning("step %d is run again after this exception", step, exc_info=error)
                return message
    except LetoError as silence:
        log.error("%s; the exception is raised now", silence)
        link.send(wire.Failing(step=step, reason=reason))
        return None
    finally:
        link.holding = False
