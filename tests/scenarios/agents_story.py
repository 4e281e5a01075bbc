"""The commands of a story about several nodes. Each prints what the agents do, in the order in which they do it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from leto_elastic.errors import LetoError
from leto_elastic.launch.actions import Death
from leto_elastic.recovery.config import load_policy
from leto_elastic.recovery.policy import FailureClass, Policy
from tests.scenarios.agents import Agents
from tests.scenarios.datadriven import Block


class AgentsStory:
    """State of one story."""

    def __init__(self, tmp_path: Path) -> None:
        self._tmp_path = tmp_path
        self._policy = Policy()
        self._commands: dict[str, Callable[[Block], str]] = {
            "nodes": self.nodes,
            "policy": self.policy,
            "kill": self.kill,
            "damage": self.damage,
            "lose": self.lose,
            "lead": self.lead,
            "late": self.late,
            "plan": self.plan,
            "go": self.go,
            "wait": self.wait,
        }

    def execute(self, block: Block) -> str:
        """Carry out one command. Raises KeyError for an unknown one."""
        return self._commands[block.name](block)

    def nodes(self, block: Block) -> str:
        """`nodes abc [spares=d] [slots=2] [step=7] [shadows=no]`: a new job in the middle of training."""
        given = block.arguments
        self._agents = Agents(
            self._policy,
            block.words[0],
            given.get("spares", ""),
            int(given.get("slots", 2)),
            int(given.get("step", 7)),
            shadows=given.get("shadows") != "no",
        )
        return ""

    def policy(self, block: Block) -> str:
        """`policy` and lines of YAML: what differs from the defaults, for the next `nodes`."""
        path = self._tmp_path / "policy.yaml"
        path.write_text("\n".join(block.input), encoding="utf-8")
        try:
            self._policy = load_policy(str(path))
        except LetoError as error:
            return str(error).replace(str(path), path.name)
        return ""

    def kill(self, block: Block) -> str:
        """`kill rank=3[,4] [cause=signal] [unheard]` and a line that says why: processes end, one after the other.

        `unheard`: the leader decides before it hears of it.
        """
        cause = FailureClass(block.arguments.get("cause", "signal"))
        for rank in block.arguments["rank"].split(","):
            self._agents.kill(int(rank), cause, " ".join(block.input), unheard="unheard" in block.words)
        return self._agents.news()

    def damage(self, block: Block) -> str:
        """`damage rank=3`: its memory does not match its checksums."""
        self._agents.damage(int(block.arguments["rank"]))
        return self._agents.news()

    def lose(self, block: Block) -> str:
        """`lose node=b`: the node is gone with all it had."""
        self._agents.lose(block.arguments["node"])
        return self._agents.news()

    def lead(self, block: Block) -> str:
        """`lead node=c`: another node leads from now on, and starts from the records."""
        self._agents.lead(block.arguments["node"])
        return ""

    def late(self, block: Block) -> str:
        """`late rank=3 epoch=0`: a report that was held up on its way."""
        rank, epoch = int(block.arguments["rank"]), int(block.arguments["epoch"])
        death = Death(rank, rank, 1, -9, FailureClass.SIGNAL, self._agents.step, "compute", 0)
        accepted = self._agents.report(epoch, death)
        return self._agents.news() if accepted else "of no effect"

    def plan(self, block: Block) -> str:
        """`plan`: the leader decides about the failures of the epoch; then what the agents do."""
        assert not block.words
        agents = self._agents
        if not agents.mirror.failures:
            return f"{agents.leader} has nothing to decide"
        decision = agents.decide()
        heading = f"{agents.leader} decides for epoch {agents.mirror.epoch}"
        if decision.action == "wait":
            heading = f"{agents.leader} does not decide yet"
        lines = [f"{heading}: {decision.action}, {decision.reason}"]
        lines += [f"  {repair.action} rank {repair.rank}" for repair in decision.repairs]
        return "\n".join([*lines, agents.news()])

    def go(self, block: Block) -> str:
        """`go stopped|standing|restored|ready|launched|committed`: so far on the way into the epoch."""
        stage = block.words[0]
        reached = self._agents.go(stage)
        return "\n".join(line for line in (self._agents.news(), "" if reached else f"not {stage}") if line)

    def wait(self, block: Block) -> str:
        """`wait seconds=600`."""
        self._agents.now += float(block.arguments["seconds"])
        return ""
