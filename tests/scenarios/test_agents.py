"""Whatever fails on the way into an epoch, the agents get into one, or the job ends by a limit: nobody gets stuck."""

from __future__ import annotations

from hypothesis import event, given, settings
from hypothesis import strategies as st

from leto_elastic.recovery.policy import FailureClass, Policy
from tests.scenarios.agents import STAGES, Agents

KILLS = (FailureClass.EXIT, FailureClass.SIGNAL, FailureClass.EXCEPTION, FailureClass.OOM, FailureClass.HANG)

kills = st.tuples(st.just("kill"), st.integers(0, 5), st.sampled_from(KILLS), st.booleans())
damages = st.tuples(st.just("damage"), st.integers(0, 5))
losses = st.tuples(st.just("lose"), st.sampled_from("abcde"))
leaders = st.tuples(st.just("lead"), st.integers(0, 2))
blows = st.one_of(kills, kills, damages, losses, leaders)


def has_process(agents: Agents, rank: int) -> bool:
    """Whether a rank has one that could end, and whose end its agent has not heard of yet."""
    for agent in agents.members:
        if rank in agent.job.world.own:
            slot = agent.slot_of(rank)
            return slot.trainer is not None or (slot.awaiting and slot.standby is not None)
    return False


def strike(agents: Agents, blow: tuple[object, ...]) -> None:
    match blow:
        case ("kill", int(rank), FailureClass() as cause, bool(unheard)) if has_process(agents, rank):
            agents.kill(rank, cause, "", unheard=unheard)
        case ("damage", int(rank)) if has_process(agents, rank) and not agents.launched:
            agents.damage(rank)
        case ("lose", str(node)) if node in agents.agents and len(agents.members) > 2:
            agents.lose(node)
        case ("lead", int(index)):
            agents.lead(agents.members[index % len(agents.members)].name)


def over(agents: Agents) -> bool:
    return all(agent.job.over for agent in agents.members)


@settings(max_examples=300, deadline=None)
@given(st.booleans(), st.lists(st.tuples(st.sampled_from(STAGES), st.lists(blows, min_size=1, max_size=4)), max_size=8))
def test_nobody_gets_stuck(shadows: bool, course: list[tuple[str, list[tuple[object, ...]]]]) -> None:
    agents = Agents(Policy(), "abc", "de", 2, 7, shadows=shadows)
    for stage, together in course:
        if over(agents):
            break
        agents.go(stage)
        for blow in together:
            strike(agents, blow)
        if agents.mirror.failures:
            agents.decide()
        agents.arrive()
    for _ in range(10):  # nothing fails any more; what was not heard of yet is reported again in the newest epoch
        if not agents.mirror.failures or over(agents):
            break
        if agents.decide().action == "wait":
            agents.now += agents.policy.deadlines.replace
    event("ended by a limit" if over(agents) else "goes on")
    if not over(agents):
        assert not agents.mirror.failures
        before = agents.step
        assert agents.go("committed"), agents.news()
        assert agents.step > before
        epochs = {agent.job.epoch for agent in agents.members}
        assert epochs == {agents.mirror.epoch}, "all in the same epoch"
        assert len({rank for agent in agents.members for rank in agent.job.world.own}) == 6
