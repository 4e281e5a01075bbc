"""The loop behind `leto.steps`: run, vote, commit; and when something was lost, rejoin, resolve, go on.

One step of one rank:

    open    batch s                                       header COMPUTE(s)
    body    forward, backward, ... optimizer.step():
              gradients and pending extras to segments    header VOTE(s)
              the vote: every rank got here               header UPDATE(s, 0)
              the update, chunk by chunk                  header UPDATE(s, i)
    leave   what changes once a step; extras(s+1)         header COMPUTE(s+1) (or SECTION): the commit

A failure only ever surfaces in `optimizer.step()` (as an exception that ends the body), in the exit of `with step:`, in
a section or in the barrier at the end. Then `_recover` joins the next epoch, learns where every rank stands, and either
rolls this rank forward from its segments or rewinds it to the start of the step. Nothing after the vote needs a peer,
so what is rolled forward is rolled forward alone.

When memory was lost elsewhere, the agent puts this rank's segments back to an earlier step while `_recover` waits for a
plan. The header is then not what this process left, and X is read again, the position in the data with it.

Rejected: going on inside the body after a recovery in `optimizer.step()`; what follows it there may be a collective,
which a promoted shadow, having no body to return to, would not enter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from leto_elastic import wire
from leto_elastic.errors import LetoError, StateError
from leto_elastic.recovery.resolution import resolve
from leto_elastic.state import rng
from leto_elastic.state.header import Phase, Position
from leto_elastic.state.model import reset
from leto_elastic.state.reducer import forget_backward
from leto_elastic.state.replicas import replicas
from leto_elastic.state.retained import Retained
from leto_elastic.state.train_state import TrainState
from leto_elastic.state.transaction import Transaction
from leto_elastic.worker import fault_hooks, numbers
from leto_elastic.worker.holding import hold, is_consequence, may_hold
from leto_elastic.worker.protection import Protection, Words, words_of
from leto_elastic.worker.reports import Reports
from leto_elastic.worker.sections import run_section, start_of
from leto_elastic.worker.session import Session, checksum_by
from leto_elastic.worker.step import Step, StepLost, refuse_misuse, refuse_scaled

log = logging.getLogger(__name__)

FINAL_BUCKETS = 3
"""Steps after which DDP's logging data tells the bucket layout that it has used since the second."""


class Runner:
    """Drives one training state through its steps, in a trainer or in a process that has become one."""

    def __init__(self, session: Session, state: TrainState, until: int) -> None:
        self.session = session
        self.state = state
        self.until = until
        self.retained: Retained
        self.transaction: Transaction
        self.protection: Protection
        self.step = 0
        self._batch: Any = None
        self._batch_step = -1
        self._before: dict[str, Any] = {}  # position in the data at the start of the step
        self._after: dict[str, Any] = {}  # and after its batch was taken
        self._rng_after: dict[str, Any] = {}
        self._first_batch: Any = None
        self._setup = b""
        self._fresh: list[int] = []
        self._adopted: tuple[str, Position] | None = None
        self._released = False  # every rank has committed the last step
        self._stepped = False
        self._voted = False  # what came before in this step has changed nothing, on any rank
        self._unapplied = ""  # why this step has no update
        self._plan: tuple[wire.Plan, Position] | None = None  # to go on with after an exception, and where it was
        self._reports = Reports(session, "start")
        self._commits = 0
        self._user_step: Callable[..., Any] | None = None
        self._release: Callable[[], None] = lambda: None

    # ---- the loop

    def start(self) -> None:
        """A trainer before its first step: allocate, move the state onto segments, write X(0)."""
        self._setup = self.session.fabric.stop_recording()
        self._before = self.state.cursor.position()
        data = self.state.capture(self._before)
        model, protect = self.state.model, self.session.welcome.protect
        self.retained = Retained.create(
            model,
            self.state.optimizer,
            self.session.link.alloc,
            elementwise=self.state.elementwise,
            extras_bytes=len(data),
            chunk_bytes=self.session.policy.state.chunk_bytes,
            snapshots=protect,
            replicas=replicas(model, model.parameters(), self.session.rank) if protect else (),
            checksum=checksum_by(self.session.policy),
        )
        self.retained.extras.write(0, data)
        self.retained.header.epoch = self.session.fabric.epoch
        self.retained.header.position = Position(0, Phase.COMPUTE)
        self._install()

    def prepare(self, retained: Retained) -> None:
        """A shadow whose trainer has died: read what it will need, while its promotion is decided.

        Where its rank stands tells what will be resolved, but for a rank between its vote and the vote's result.
        """
        self._take(retained)
        position = retained.header.position
        if position.phase is Phase.UPDATE:
            self._adopt("forward")
        elif position.phase is not Phase.VOTE:
            self._adopt("rerun")
            if position.step < self.until:
                self._open()

    def _take(self, retained: Retained) -> None:
        if self._adopted is not None and self.retained is not retained:
            self._adopted = None  # it was attached again since it was read
        self.retained = retained
        self.step = retained.header.position.step
        self._commits = FINAL_BUCKETS

    def _adopt(self, action: str) -> None:
        """Read the extras for this action into a process that was a shadow, once."""
        position = self.retained.header.position
        if self._adopted == (action, position):
            return
        self._batch_step = -1
        slot = position.slot + (action == "forward")
        data = self.state.restore(self.retained.extras.read(slot), cursor=True)
        if action == "forward":
            self._after = data
        else:
            self._before = data
        self._adopted = (action, position)

    def resume(self, retained: Retained, plan: wire.Promote) -> None:
        """A shadow that was promoted: take the state over and join the epoch of the plan."""
        self._take(retained)
        self._install()
        self._recover(plan)

    def _install(self) -> None:
        session = self.session
        torn = fault_hooks.torn_point(session.faults, lambda: self.step)
        self.transaction = Transaction(self.retained, session.link.alloc, self._publish, torn)
        welcome = session.welcome
        self.protection = Protection(self.retained.header, session.link, welcome.protect, welcome.every, self.until)
        self.protection.generation = session.generation
        session.watched(self.retained.header)
        self._user_step = self.state.optimizer.step

        def step(closure: Callable[[], Any] | None = None) -> Any:
            return self._optimizer_step(closure)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # else schedulers warn about a replaced step()
        self.state.optimizer.step = step  # type: ignore[method-assign]

    def loop(self) -> Iterator[Step]:
        """The steps from here to the last one."""
        while True:
            try:
                self._run_sections()
                if self.step >= self.until:
                    if not self._released:
                        self._barrier()
                    self._finish()
                    return
                if self.session.skip == self.step:
                    self._step_over()
                    continue
            except StepLost:
                self._recover()
                continue
            step = self._open()
            yield step
            if step.outcome == "lost":
                self._recover()
            elif step.outcome != "committed":
                raise LetoError(
                    f"step {step.number} of leto.steps was not run: write `for step in ...: with step: ...`"
                )

    def _open(self) -> Step:
        if self._batch_step != self.step:
            self._batch = self.state.cursor.next()
            self._batch_step = self.step
            self._after = self.state.cursor.position()
            self._rng_after = rng.capture()
            if self._first_batch is None and self._commits == 0:
                self._first_batch = self._batch
        else:
            rng.restore(self._rng_after)
        self._stepped = self._voted = False
        self._unapplied = ""
        return Step(self, self.step, self._batch, rehearsal=False)

    def _step_over(self) -> None:
        """Take the batch of a step that is not to be run again, and commit. Raises StepLost."""
        with self._reports.telling(self.step):
            self._open()
            self._unapplied = "it raised again after a recovery"
            self._leave_as_it_is()
            self._commit(in_body=True)

    def _leave_as_it_is(self) -> None:
        """A step of its own all the same, without an update."""
        self._vote(apply=False)
        self._fresh = self.transaction.skip()

    # ---- one step, called by it

    def enter(self, step: Step) -> None:
        """The body begins."""
        self.session.fabric.tolerant = True
        self._release = fault_hooks.arm(self.session.faults, self.state.model, step.number)
        try:
            self.session.faults.at("compute", step.number)
        except Exception as error:  # boundary: told to the agent, then raised
            self.session.fabric.tolerant = False
            self._reports.failing(self.step, error)
            raise

    def leave(self, step: Step, error: BaseException | None) -> bool:
        """The body ended. True: what it raised was a consequence of a failure elsewhere, and is dealt with."""
        fabric = self.session.fabric
        fabric.tolerant = error is not None  # what it has left under way is still to be ended
        self._release()
        if fabric.poisoned if error is None else is_consequence(self.session, error):
            if error is not None and not isinstance(error, StepLost):
                log.info("step %d: %s: %s, after a failure elsewhere", step.number, type(error).__name__, error)
            step.outcome = "lost"
            return True
        if error is not None:
            return self._raised(step, error)
        try:
            with self._reports.telling(self.step):
                if not self._stepped:
                    self._leave_as_it_is()
                self._commit(in_body=True)
        except StepLost:
            step.outcome = "lost"
            return True
        step.outcome = "committed"
        return False

    def _raised(self, step: Step, error: BaseException) -> bool:
        """The body raised by itself. True: the step is to be run again by this process."""
        fabric = self.session.fabric
        if self._voted or not may_hold(self.session, error):
            self._reports.failing(self.step, error)
        else:
            left = self.retained.header.position  # which may be put back meanwhile
            plan = hold(self.session, self.step, error)
            self._plan = None if plan is None else (plan, left)
        if self._plan is not None:
            reset(self.state.model)
            forget_backward(self.state.model, fabric)
            step.outcome = "lost"
        fabric.tolerant = False
        return self._plan is not None

    def _optimizer_step(self, closure: Callable[[], Any] | None = None) -> Any:
        optimizer = self.state.optimizer
        refuse_misuse(self.step, inside=self.session.fabric.tolerant, again=self._stepped)
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        refuse_scaled(optimizer)
        for hook in list(optimizer._optimizer_step_pre_hooks.values()):
            hook(optimizer, (), {})
        applied = self._vote()
        self._stepped = True
        self._fresh = self.transaction.run() if applied else self.transaction.skip()
        optimizer._opt_called = True  # type: ignore[attr-defined]
        for hook in list(optimizer._optimizer_step_post_hooks.values()):
            hook(optimizer, (), {})
        return result

    def _vote(self, *, apply: bool = True) -> bool:
        """Save what the update needs, then learn that every rank has; whether to apply it. Raises StepLost."""
        session = self.session
        if session.fabric.poisoned:
            raise StepLost(session.fabric.reason)
        self.transaction.save_gradients(apply=apply)
        header = self.retained.header
        self._write_extras(header.position.slot + 1, self._after)
        header.position = header.position._replace(step=self.step, phase=Phase.VOTE, torn=False, chunk=0)
        session.faults.at("vote", self.step)
        self._voted = True
        lowest, refused = numbers.vote(session, self.retained, self.transaction, self.protection, guarded=apply)
        if lowest is None:
            raise StepLost(session.fabric.reason)
        self._unapplied = refused or self._unapplied
        self.protection.decide(self.step, lowest)
        return apply and not refused

    def _commit(self, *, in_body: bool) -> None:
        state, retained = self.state, self.retained
        for function in state.once:
            function()
        if state.scheduler is not None:
            state.scheduler.step()
        if state.once and retained.sums is not None:
            retained.sums.retouched(self.step + 1)
        self.transaction.drop_gradients(check=in_body and self._commits < 2)
        following = self.step + 1
        first = self._commits == 0
        if self._fresh or first:
            retained.settle(
                self._fresh,
                following,
                self.session.link.alloc,
                self.session.policy.state.chunk_bytes,
                buckets=not first,
            )
            if not first:
                self._publish()
        slot = (retained.header.position.slot + 2) % 3
        self._before = self._after
        self._write_extras(slot, self._before)
        self.session.faults.at("commit", self.step)
        self.protection.before_commit(self.step)
        retained.header.position = start_of(self.state, following, 0, slot)
        self.step = following
        self._commits += 1
        if first:
            self._reports.setup(self._setup, self._first_batch)
            self._first_batch = None
            self._publish()
        elif self._commits == FINAL_BUCKETS and retained.refresh_buckets():
            self._publish()
        self.protection.after_commit()
        if in_body:
            self.protection.ask()
            self._reports.committed(self.step)
        if in_body and self._unapplied:
            self._reports.skipped(self.step - 1, self._unapplied)

    def _write_extras(self, slot: int, position: dict[str, Any]) -> None:
        data = self.state.capture(position)
        if not self.retained.extras.fits(data):
            self.retained.grow_extras(len(data), self.session.link.alloc)
            if self.retained.manifest.version > 1:
                self._publish()
        self.retained.extras.write(slot, data)

    def _publish(self) -> None:
        self._reports.manifest(self.retained.manifest)
        self.retained.header.layout = self.retained.manifest.version

    # ---- between steps

    def _run_sections(self) -> None:
        header = self.retained.header
        while header.position.phase is Phase.SECTION:
            index = header.position.chunk
            run_section(self.state, index, self.session.fabric, self._reports, self.step)
            header.position = start_of(self.state, self.step, index + 1, header.position.slot)

    def _barrier(self) -> None:
        """Wait until every rank has committed the last step. Raises StepLost."""
        session = self.session
        header = self.retained.header
        header.position = header.position._replace(step=self.step, phase=Phase.DONE, chunk=0)
        if session.fabric.vote() is None:
            raise StepLost(session.fabric.reason)
        self._reports.committed(self.step)

    def _finish(self) -> None:
        self.session.link.send(wire.Finished(step=self.step))
        assert self._user_step is not None
        self.state.optimizer.step = self._user_step  # type: ignore[method-assign]

    # ---- after a failure

    def _recover(self, promotion: wire.Promote | None = None) -> None:
        session, header = self.session, self.retained.header
        session.fabric.tolerant = False
        session.mark("abort")
        plan, left = (promotion, header.position) if self._plan is None else self._plan
        self._plan = None
        rows = session.rejoin(plan, lambda: words_of(header), self.step)
        if rows is None:
            self._released = True
            rows = [list(words_of(header))] * session.welcome.world_size
        self.protection.generation = session.generation
        header.epoch = session.fabric.epoch
        words = [Words(*row) for row in rows]
        resolution = resolve({rank: Position.unpack(row.position) for rank, row in enumerate(words)})
        own = resolution.action[session.rank]
        adopt = self._take_up(left) or promotion is not None
        reset(self.state.model)
        if own == "forward":
            self._roll_forward(words, adopt=adopt)
        else:
            self._rewind(adopt=adopt)
        header.position = start_of(self.state, self.step, resolution.section, header.position.slot)
        self._adopted = None
        self.protection.joined()
        self.protection.ask(again=True)
        session.mark("resolve")
        self._reports.joined(own)
        if promotion is not None:
            session.activate()
        if self.step != resolution.step:
            raise StateError(f"rank {self.session.rank} resolved to step {self.step} instead of {resolution.step}")

    def _take_up(self, left: Position) -> bool:
        """Go on from where the header stands. True when the agent has put it back meanwhile, from where it was left."""
        manifest, position = self.retained.manifest, self.retained.header.position
        if manifest.at(position.step) is not manifest:
            raise StateError(f"put back to step {position.step}, the layout holds from step {manifest.since} on")
        self.step = position.step
        return position != left

    def _roll_forward(self, words: list[Words], *, adopt: bool) -> None:
        """The vote of this step passed somewhere, so all gradients are whole: finish it from the segments."""
        if adopt:
            self._adopt("forward")
        if self.retained.header.position.phase is Phase.VOTE:
            self.protection.follow(words)
        self.transaction.load_gradients()
        self._fresh = self.transaction.run()
        self._commit(in_body=False)

    def _rewind(self, *, adopt: bool) -> None:
        """Nobody has changed anything for this step: back to its start."""
        if adopt:
            self._adopt("rerun")
            self.transaction.rewound()
        else:
            data = self.retained.extras.read(self.retained.header.position.slot)
            self._before = self.state.restore(data, cursor=False)
        self.transaction.drop_gradients(check=False)
