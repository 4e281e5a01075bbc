"""Handles of collectives that never throw into the middle of a backward pass, and never stay blocked.

An exception out of a collective inside autograd leaves DDP's reducer and FSDP2's unshard state half-way: the next
forward fails or, worse, computes with stale parameters. So within a step a failed collective poisons the epoch *before*
its `wait` returns and then looks finished, also to whoever holds its future, which must hold tensors (DDP's reducer
asserts on an empty one). The results are garbage that nobody uses: the vote fails. Outside of a step `wait` raises.

Ending the connections is not quite enough to wake gloo: a buffer that is partly sent or partly received at that moment
is forgotten by `Pair::signalException` (gloo as in torch 2.13), and a receive from any source is told nothing at all;
both sleep until their timeout, half an hour away. So nobody here blocks in gloo for good. Waits go in slices, and
`abandon` ends a handle without gloo. When that is safe is `quiet`'s business.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import Work

from leto_elastic.errors import CommunicatorLost

_NO_TIMEOUT = timedelta(0)
_SLICE = timedelta(milliseconds=10)
_GLANCE = timedelta(milliseconds=1)
_TIME_IS_UP = "Operation timed out"  # of c10d::Work::wait; gloo's own timeouts say "Timed out waiting"
_PENDING = TimeoutError(_TIME_IS_UP)


class Judge(Protocol):
    """The one who knows what a failed collective means: the fabric."""

    def failed(self, epoch: int, reason: str) -> None:
        """A collective of `epoch` failed: poison it."""

    def forgives(self, epoch: int) -> bool:
        """Whether a lost collective of `epoch` has to look finished."""

    def error(self, epoch: int) -> CommunicatorLost:
        """What a lost collective of `epoch` raises otherwise."""


class LetoWork(Work):
    """One collective.

    `inner` None: already over; `lost` then says whether it never ran. `on_done` gets the inner work when it succeeded;
    `take` is called before it, to fill the outputs from what gloo has made.
    """

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
        owner: int = 0,
        slices: bool = True,
        take: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self.epoch = epoch
        self.owner = owner  # id of the inner group whose destructor waits for it, 0: none
        self.inner = inner
        self._slice = _SLICE if slices else _NO_TIMEOUT  # NCCL's wait does not block the host, unless it has a limit
        self._judge = judge
        self._outputs = outputs
        self._lost = lost
        self._source = source
        self._on_done = on_done
        self._take = take
        self._own = take is not None
        self._settled = inner is None
        self._answered = False  # gloo has told its outcome
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None
        self._future_done = False

    def _settle(self, error: BaseException | None) -> None:
        """First outcome wins; poison comes before anyone can see the work as over."""
        with self._lock:
            if self._settled:
                return
            if error is not None:
                self._judge.failed(self.epoch, str(error).partition("\n")[0])
                self._lost = True
            else:
                if self._take is not None:
                    self._take()
                if self._on_done is not None and self.inner is not None:
                    self._on_done(self.inner)
            self._settled = True
            self._on_done = self._take = None

    # ---- for the fabric

    @property
    def over(self) -> bool:
        """Whether gloo has nothing to do with it any more."""
        return self.inner is None or self._answered or self._ended()

    def _ended(self) -> bool:
        assert self.inner is not None
        return self.inner.is_completed() or bool(self._slice and _ask(self.inner, _GLANCE) is not _PENDING)

    def abandon(self) -> None:
        """End it, whatever gloo does: whoever waits for it or for its future goes on. Any thread."""
        self._settle(CommunicatorLost("aborted"))
        with self._lock:
            future = self._future
        if future is not None:
            self._complete(future, self._outputs)

    def join(self) -> bool:
        """Block until it is over; whether it was not lost. Never raises."""
        self._block(_NO_TIMEOUT)
        return not self._lost

    # ---- for torch and users

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Block until complete. Raises CommunicatorLost, outside of a step only, when the communicator was lost."""
        self._block(timeout)
        if self._lost and not self._judge.forgives(self.epoch):
            # Not held in a variable: the exception's traceback holds this frame, and with it the inner group.
            raise self._judge.error(self.epoch)
        return True

    def _block(self, timeout: timedelta) -> None:
        end = time.monotonic() + timeout.total_seconds()
        while not self._settled and self.inner is not None:
            answer = _ask(self.inner, self._slice or timeout)
            if answer is _PENDING:
                if not timeout or time.monotonic() < end:
                    continue
                answer = TimeoutError(f"no end within {timeout.total_seconds()} s")
            else:
                self._answered = True
            self._settle(answer)

    def synchronize(self) -> None:
        """`wait` without a result (for a device: make the current stream wait)."""
        self.wait()

    def block_current_stream(self) -> None:
        """For a device: make the current stream wait without blocking the host."""
        if self.inner is not None and not self._settled:
            self.inner.block_current_stream()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future with the output tensors; after a loss within a step it holds them too."""
        with self._lock:
            if self._future is not None:
                return self._future
            inner = None if self._settled or self.inner is None else self.inner.get_future()
            future: torch.futures.Future[Any] = torch.futures.Future()
            self._future = future
        if inner is None:
            self._complete(future, self._outputs)
            return future

        def over(done: torch.futures.Future[Any]) -> None:
            self._answered = True
            try:
                value = done.value()
            except RuntimeError as error:
                self._settle(error)
                self._complete(future, self._outputs)
            else:
                self._settle(None)
                self._complete(future, self._outputs if self._own else value)

        inner.add_done_callback(over)
        return future

    def _complete(self, future: torch.futures.Future[Any], value: Any) -> None:
        with self._lock:
            if self._future_done:
                return
            self._future_done = True
        if self._lost and not self._judge.forgives(self.epoch):
            future.set_exception(self._judge.error(self.epoch))
        else:
            future.set_result(value)

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._settled or self.inner is None or self.inner.is_completed()

    def is_success(self) -> bool:
        """Whether it is complete and was not lost."""
        if self._settled or self.inner is None:
            return not self._lost
        return self.inner.is_success()

    def exception(self) -> Any:
        """The exception of a failed collective, if it is already over."""
        if self._lost:
            return None if self._judge.forgives(self.epoch) else self._judge.error(self.epoch)
        return self.inner.exception() if self.inner is not None else None

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._outputs

    def source_rank(self) -> int:
        """Rank in the group that a receive from any source got its data from (0 when it was lost)."""
        if self._lost:
            return 0
        return self.inner._source_rank() if self.inner is not None else max(self._source, 0)

    _source_rank = source_rank


def _outcome(inner: Work, timeout: timedelta = _NO_TIMEOUT) -> BaseException | None:
    """How a wait ends: None, or the error."""
    try:
        inner.wait(timeout)
    except RuntimeError as error:
        return error.with_traceback(None)  # its frames would keep the work, and the inner group's sockets, alive
    return None


def _ask(inner: Work, within: timedelta) -> BaseException | None:
    """The outcome, `_PENDING` when there is none yet.

    torch says by a message that the time is up. `is_completed` is no help: some works always deny it.
    """
    error = _outcome(inner, within)
    return _PENDING if error is not None and _TIME_IS_UP in str(error) else error


class PointToPointWork(LetoWork):
    """A send or receive.

    A wait for one that runs out of time breaks all of gloo's connections, so it cannot go in slices: a thread waits,
    and this one for either the thread or `abandon`. After an abort that gloo does not tell the operation about, the
    thread stays until the group's timeout.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def over(self) -> bool:
        """Whether gloo has nothing to do with it any more. One that nobody waits for counts as over."""
        return self._thread is None or not self._thread.is_alive()

    def _block(self, timeout: timedelta) -> None:
        with self._lock:
            if self._thread is None and not self._settled:
                self._thread = threading.Thread(
                    target=self._wait_for_gloo, args=[timeout], name="leto-p2p", daemon=True
                )
                self._thread.start()
        if not self._settled:
            self._done.wait()

    def _wait_for_gloo(self, timeout: timedelta) -> None:
        assert self.inner is not None
        self._settle(_outcome(self.inner, timeout))
        self._done.set()

    def abandon(self) -> None:
        """See `LetoWork.abandon`."""
        super().abandon()
        self._done.set()

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._settled or (self.inner is not None and self.inner.is_completed())
