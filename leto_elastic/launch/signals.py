"""Signals of the agent: death signals end the job, SIGUSR1 and SIGUSR2 are passed on."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_DEATH = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


def death_signals() -> list[signal.Signals]:
    """The signals of torchrun's `--signals-to-handle`; names that this system does not have are left out."""
    names = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", _DEATH).split(",")
    return [signal.Signals[name.strip()] for name in names if name.strip() in signal.Signals.__members__]


@contextmanager
def handled(interrupt: Callable[[int], None], forward: Callable[[int], None]) -> Iterator[None]:
    """Within, the running loop calls `interrupt` and `forward` with signal numbers. Outside the main thread, nothing.

    Afterwards the handlers are what they were.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    handlers: dict[int, Callable[[int], None]] = dict.fromkeys(_PASSED_ON, forward)
    handlers.update(dict.fromkeys(death_signals(), interrupt))
    before = {number: signal.getsignal(number) for number in handlers}
    installed: list[int] = []
    try:
        for number, handler in handlers.items():
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                loop.add_signal_handler(number, handler, number)
                installed.append(number)
        yield
    finally:
        for number in installed:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number] or signal.SIG_DFL)
