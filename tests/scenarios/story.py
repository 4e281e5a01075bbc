"""The commands of a story: a `World` of headers, the policy and the decisions about it. Each prints what happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

from leto_elastic.errors import LetoError
from leto_elastic.recovery.config import load_policy
from leto_elastic.recovery.ladder import Failure, JobView, ShadowState, decide, remember
from leto_elastic.recovery.policy import FailureClass, Policy
from leto_elastic.recovery.resolution import describe
from leto_elastic.state.header import Phase
from tests.scenarios.datadriven import Block
from tests.scenarios.world import World


class Story:
    """State of one story. The slot of a rank has the rank's number."""

    def __init__(self, tmp_path: Path) -> None:
        self._tmp_path = tmp_path
        self._policy = Policy()
        self._world = World(1, 1)
        self._view = self._start()
        self._commands: dict[str, Callable[[Block], str]] = {
            "job": self.job,
            "policy": self.policy,
            "set": self.set,
            "shadow": self.shadow,
            "run": self.run,
            "where": self.where,
            "kill": self.kill,
            "raise": self.raise_,
            "plan": self.plan,
            "resolve": self.resolve,
            "finish": self.finish,
        }

    def _start(self) -> JobView:
        return JobView(
            epoch=0,
            step_of_failure=0,
            failures=(),
            shadows=dict.fromkeys(self._world.at, "ready"),
            protected=True,
            leto_job=True,
            finished=False,
            history=(),
            now=0.0,
            restarts_left=0,
            budget=self._policy.limits.per_job,
        )

    def execute(self, block: Block) -> str:
        """Carry out one command. Raises KeyError for an unknown one."""
        return self._commands[block.name](block)

    def _change(self, **changes: object) -> None:
        fields = {name: getattr(self._view, name) for name in JobView.__struct_fields__}
        self._view = JobView(**{**fields, **changes})

    def job(self, block: Block) -> str:
        """`job ranks=4 until=9 [chunks=2] [sections=N at=STEP] [step=S]`: a new job, all at step S, shadows ready."""
        given = {key: int(value) for key, value in block.arguments.items()}
        sections, when = given.get("sections", 0), given.get("at")
        self._world = World(
            given["ranks"],
            given["until"],
            given.get("chunks", 2),
            lambda step: sections if when is not None and step == when else 0,
        )
        for rank in self._world.at:
            self._world.at[rank] = self._world.start_of(given.get("step", 0))
            self._world.applied[rank] = list(range(given.get("step", 0)))
        self._view = self._start()
        return ""

    def policy(self, block: Block) -> str:
        """`policy` and lines of YAML: what differs from the defaults, for the next `job`."""
        path = self._tmp_path / "policy.yaml"
        path.write_text("\n".join(block.input), encoding="utf-8")
        try:
            self._policy = load_policy(str(path))
        except LetoError as error:
            return str(error).replace(str(path), path.name)
        return ""

    def set(self, block: Block) -> str:
        """`set protected=no leto_job=no finished=yes restarts_left=2 now=10`: what the leader knows besides."""
        for key, value in block.arguments.items():
            self._change(**{key: {"yes": True, "no": False}[value] if value in ("yes", "no") else int(value)})
        return ""

    def shadow(self, block: Block) -> str:
        """`shadow slot=2 none|starting|ready|unfit`."""
        slots = dict(self._view.shadows)
        slots[int(block.arguments["slot"])] = cast(ShadowState, block.words[0])
        self._change(shadows=slots)
        return ""

    def run(self, block: Block) -> str:
        """`run rank=2[,3]|all phase=update [step=7] [chunk=1] [torn]`: on, in turn, till they stand so."""
        given = block.arguments
        chosen = list(self._world.at) if "all" in block.words else [int(rank) for rank in given["rank"].split(",")]
        moving = True
        while moving:
            moving = any([self._world.move(rank) for rank in chosen if not self._stands(rank, block)])  # noqa: C419
        return "\n".join(
            f"rank {rank} cannot go on from {describe(self._world.at[rank])}"
            for rank in chosen
            if not self._stands(rank, block)
        )

    def _stands(self, rank: int, block: Block) -> bool:
        at, given = self._world.at[rank], block.arguments
        return (
            at.phase is Phase[given["phase"].upper()]
            and at.torn == ("torn" in block.words)
            and ("step" not in given or at.step == int(given["step"]))
            and at.chunk == int(given.get("chunk", 0))
        )

    def where(self, block: Block) -> str:
        """`where`: the position of each rank."""
        return "\n".join(
            f"rank {rank}: {describe(at)}{' (dead)' if rank in self._world.dead else ''}"
            for rank, at in self._world.at.items()
        )

    def kill(self, block: Block) -> str:
        """`kill rank=2[,3] [cause=exit|signal|exception|oom|hang|state]`: processes end, each where it stands.

        A line below it is what is known of it.
        """
        cause = FailureClass(block.arguments.get("cause", "signal"))
        return self._fail(block, cause, "dies")

    def raise_(self, block: Block) -> str:
        """`raise rank=2[,3]` and the error: processes hold an exception, each where it stands, and wait."""
        return self._fail(block, FailureClass.EXCEPTION, "raises")

    def _fail(self, block: Block, cause: FailureClass, how: str) -> str:
        lines = []
        detail = " ".join(block.input)
        held, digest = how == "raises", detail if cause is FailureClass.EXCEPTION else ""
        for rank in (int(rank) for rank in block.arguments["rank"].split(",")):
            at = self._world.at[rank]
            self._world.kill(rank)
            failure = Failure(rank, rank, cause, at.step, held, digest, detail)
            self._change(failures=(*self._view.failures, failure))
            lines.append(f"rank {rank} {how} at {describe(at)}")
        return "\n".join(lines)

    def plan(self, block: Block) -> str:
        """`plan`: what the leader decides about the failures since the last plan."""
        self._change(step_of_failure=max(failure.step for failure in self._view.failures))
        decision = decide(self._policy, self._view)
        lines = [f"epoch {self._view.epoch + 1}: {decision.action}, {decision.reason}"]
        lines += [f"  {repair.action} rank {repair.rank} in slot {repair.slot}" for repair in decision.repairs]
        if decision.action == "repair":
            past = remember(self._view, decision)
            now = self._view.now + 1.0
            self._change(epoch=past.epoch, history=(*self._view.history, past), budget=self._view.budget - 1, now=now)
        self._change(failures=())
        return "\n".join(lines)

    def resolve(self, block: Block) -> str:
        """`resolve`: every rank has a process again, in the new epoch, and knows what to do."""
        try:
            resolution = self._world.recover()
        except LetoError as error:
            return str(error)
        lines = [f"rank {rank}: {action}" for rank, action in resolution.action.items()]
        if resolution.section is not None and resolution.section < self._world.due(resolution.step):
            lines.append(f"sections again from {resolution.section}")
        if self._view.history and self._view.history[-1].skip == resolution.step:
            self._world.step_over(resolution.step)
            return "\n".join([*lines, f"step {resolution.step} is stepped over, next is step {resolution.step + 1}"])
        return "\n".join([*lines, f"next is step {resolution.step}"])

    def finish(self, block: Block) -> str:
        """`finish`: everyone goes on to the end; the ledger of what each rank applied."""
        self._world.finish()
        ledgers = {str(steps) for steps in self._world.applied.values()}
        return "\n".join(f"applied {steps}" for steps in sorted(ledgers))
