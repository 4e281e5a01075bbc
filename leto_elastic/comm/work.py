"""Handles of collectives that never throw into the middle of a backward pass.

An exception out of a collective inside autograd leaves DDP's reducer and FSDP2's unshard state half-way: the next
forward fails or, worse, computes with stale parameters. So within a step a failed collective poisons the epoch *before*
its `wait` returns and then looks finished, also to whoever holds its future, which must hold tensors (DDP's reducer
asserts on an empty one). The results are garbage that nobody uses: the vote fails. Outside of a step `wait` raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import Work

from leto_elastic.errors import CommunicatorLost

_NO_TIMEOUT = timedelta(0)
_LOOK = 0.005  # seconds between two looks of a receive from any source at its epoch


class Judge(Protocol):
    """The one who knows what a failed collective means: the fabric."""

    def failed(self, epoch: int, reason: str) -> None:
        """A collective of `epoch` failed: poison it."""

    def lost(self, epoch: int) -> bool:
        """Whether `epoch` is poisoned or over."""

    def forgives(self, epoch: int) -> bool:
        """Whether a lost collective of `epoch` has to look finished."""

    def error(self, epoch: int) -> CommunicatorLost:
        """What a lost collective of `epoch` raises otherwise."""


class LetoWork(Work):
    """One collective. `inner` None: already over; `lost` then says whether it never ran."""

    def __init__(
        self,
        judge: Judge,
        epoch: int,
        inner: Work | None,
        outputs: list[torch.Tensor],
        *,
        lost: bool = False,
        source: int = -1,
        on_done: Callable[[Work], None] | None = None,
    ) -> None:
        super().__init__()
        self._judge = judge
        self._epoch = epoch
        self._inner = inner
        self._outputs = outputs
        self._lost = lost
        self._source = source
        self._on_done = on_done
        self._settled = inner is None
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None

    def _settle(self, error: BaseException | None) -> None:
        """First outcome wins; poison comes before anyone can see the work as over."""
        with self._lock:
            if self._settled:
                return
            if error is not None:
                self._judge.failed(self._epoch, str(error).partition("\n")[0])
                self._lost = True
            elif self._on_done is not None and self._inner is not None:
                self._on_done(self._inner)
            self._settled = True
            self._on_done = None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Block until complete. Raises CommunicatorLost, outside of a step only, when the communicator was lost."""
        if not self._settled and self._inner is not None:
            self._settle(self._outcome(self._inner, timeout))
        if self._lost and not self._judge.forgives(self._epoch):
            # Not held in a variable: the exception's traceback holds this frame, and with it the inner group.
            raise self._judge.error(self._epoch)
        return True

    def _outcome(self, inner: Work, timeout: timedelta) -> BaseException | None:
        try:
            inner.wait(timeout)
        except RuntimeError as error:
            return error
        return None

    def synchronize(self) -> None:
        """`wait` without a result (for a device: make the current stream wait)."""
        self.wait()

    def block_current_stream(self) -> None:
        """For a device: make the current stream wait without blocking the host."""
        if self._inner is not None and not self._settled:
            self._inner.block_current_stream()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future with the output tensors; after a loss within a step it holds them too."""
        with self._lock:
            if self._future is not None:
                return self._future
            inner = None if self._settled or self._inner is None else self._inner.get_future()
            future: torch.futures.Future[Any] = torch.futures.Future()
            self._future = future
        if inner is None:
            self._complete(future, self._outputs)
            return future

        def over(done: torch.futures.Future[Any]) -> None:
            try:
                value = done.value()
            except RuntimeError as error:
                self._settle(error)
                self._complete(future, self._outputs)
            else:
                self._settle(None)
                self._complete(future, value)

        inner.add_done_callback(over)
        return future

    def _complete(self, future: torch.futures.Future[Any], value: Any) -> None:
        if self._lost and not self._judge.forgives(self._epoch):
            future.set_exception(self._judge.error(self._epoch))
        else:
            future.set_result(value)

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._settled or self._inner is None or self._inner.is_completed()

    def is_success(self) -> bool:
        """Whether it is complete and was not lost."""
        if self._settled or self._inner is None:
            return not self._lost
        return self._inner.is_success()

    def exception(self) -> Any:
        """The exception of a failed collective, if it is already over."""
        if self._inner is not None and not self._lost:
            return self._inner.exception()
        return self._judge.error(self._epoch) if self._lost and not self._judge.forgives(self._epoch) else None

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._outputs

    def source_rank(self) -> int:
        """Rank in the group that a receive from any source got its data from (0 when it was lost)."""
        if self._lost:
            return 0
        return self._inner._source_rank() if self._inner is not None else max(self._source, 0)

    _source_rank = source_rank


class AnySourceWork(LetoWork):
    """A receive from any source.

    gloo tells such a receive nothing when connections break: it waits for its full timeout, and nothing in gloo's
    interface wakes it. So the wait is a thread's, and this one looks after the epoch meanwhile. After an abort the
    thread stays, with the buffer, until the group's timeout ends it.
    """

    def _outcome(self, inner: Work, timeout: timedelta) -> BaseException | None:
        outcome: list[BaseException | None] = []
        over = threading.Event()

        def block() -> None:
            outcome.append(super(AnySourceWork, self)._outcome(inner, timeout))
            over.set()

        threading.Thread(target=block, name="leto-any-source", daemon=True).start()
        while not over.wait(_LOOK):
            if self._judge.lost(self._epoch):
                return CommunicatorLost("aborted during a receive from any source")
        return outcome[0]
