"""Putting `LetoElasticAgent` where torchrun's launcher looks for `LocalElasticAgent`.

torchrun has an entry point for rendezvous handlers, but none for agents. Our rendezvous creator is called by
`launch_agent` *before* that function looks up the global name `LocalElasticAgent` of its module, so the creator can
change what the name means; it means the old thing again as soon as the agent is constructed. Names and order are
checked first, in the code object that is running. Where they do not fit, the job ends with a message that points at
`leto run`, which constructs the same agent itself.

Rejected: a subclass hook or monkey patch at import (would change every job of the process, also those that do not use
leto); a sitecustomize.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

import torch
from torch.distributed.launcher import api

from leto_elastic.errors import ConfigError
from leto_elastic.launch.agent import LetoElasticAgent

TORCH = (2, 13)
_NAME = "LocalElasticAgent"
_CREATE = "get_rendezvous_handler"
_ADVICE = "use `leto run` with the same arguments instead of torchrun"

_genuine = getattr(api, _NAME, None)


def check_torch(version: str = torch.__version__) -> None:
    """Raises ConfigError unless torch is of the release that leto was tested with."""
    numbers = version.split("+", maxsplit=1)[0].split(".")
    if numbers[:2] != [str(part) for part in TORCH]:
        raise ConfigError(
            f"leto works with torch {TORCH[0]}.{TORCH[1]}, this is torch {version}: "
            f"pip install 'torch=={TORCH[0]}.{TORCH[1]}.*'"
        )


def install() -> None:
    """Called within `launch_agent`: the agent it is about to construct will be ours.

    Raises ConfigError when this is not a call from there, or its code is not as expected.
    """
    code = api.launch_agent.__code__
    problem = misfit(code)
    if problem is None and not _called_from(code):
        problem = f"the rendezvous handler of leto was not asked for by {api.__name__}.launch_agent"
    if problem is None and getattr(api, _NAME, None) not in (_genuine, _construct):
        problem = f"something else has replaced {api.__name__}.{_NAME}"
    if problem is not None:
        raise ConfigError(f"{problem}; {_ADVICE}")
    setattr(api, _NAME, _construct)


def remove() -> None:
    """Undo `install`; harmless when it was undone already."""
    if getattr(api, _NAME, None) is _construct:
        setattr(api, _NAME, _genuine)


def _construct(*args: Any, **kwargs: Any) -> LetoElasticAgent:
    remove()
    return LetoElasticAgent(*args, **kwargs)


def misfit(code: CodeType) -> str | None:
    """Why the launcher's code is not what the seam was made for, or None.

    The names of a code object are in the order of their first use.
    """
    names = code.co_names
    if _NAME not in names or _CREATE not in names:
        return f"torch {torch.__version__} does not construct its agent by the name {_NAME} any more"
    if names.index(_CREATE) > names.index(_NAME):
        return f"torch {torch.__version__} constructs its agent before it asks for the rendezvous handler"
    return None


def _called_from(code: CodeType) -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
