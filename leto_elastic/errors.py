"""The errors a user of leto_elastic can meet. Each message says what happened, where, and what to do."""

from __future__ import annotations


class LetoError(RuntimeError):
    """Base of every error raised on purpose by leto_elastic."""


class ConfigError(LetoError):
    """A setting, policy file or command line that cannot work; raised before anything starts."""


class CommunicatorLost(LetoError):
    """A collective was called on a communicator that a failure has ended.

    Inside a step or a section the runtime deals with it; outside of both it reaches the caller, so that garbage is
    never returned.
    """


class EpochAborted(LetoError):
    """The epoch that was being connected was given up because of another failure; wait for the next plan."""


class ShadowUnfit(LetoError):
    """A shadow cannot stand in for its trainer; the message is the reason that the agent reports."""


class StateError(LetoError):
    """The training state cannot be retained or restored as asked (layout, type, size)."""


class NotFinite(StateError):
    """Gradients are not finite, and `step.nonfinite` of the policy is `fail`: the job ends."""


class NotEnoughMemory(StateError):
    """The segments that the state needs do not fit into the memory that is left."""
