"""Who makes the others stand still, from where every rank stands."""

from __future__ import annotations

import msgspec

from leto_elastic.launch.culprit import Standing, culprit
from leto_elastic.state.header import Phase

DEFAULT, PAIRS, OTHERS, OWN = 1, 2, 3, 9  # keys of groups
COMPUTE, VOTE = int(Phase.COMPUTE), int(Phase.VOTE)


def at(
    rank: int,
    calls: dict[int, int],
    waiting: int = 0,
    *,
    step: int = 7,
    phase: int = COMPUTE,
    parked: bool = False,
    silent: bool = False,
    last: int = 0,
) -> Standing:
    return Standing(rank, step, phase, waiting, calls, {waiting: last} if waiting else {}, parked, silent)


def test_a_rank_that_sleeps_in_the_body_while_the_others_wait() -> None:
    ranks = [at(rank, {DEFAULT: 12}, DEFAULT) for rank in range(4) if rank != 2]
    verdict = culprit([*ranks, at(2, {DEFAULT: 10})])
    assert verdict == ((2,), "did not enter the collective that 3 ranks wait in")


def test_a_rank_that_sleeps_before_its_vote() -> None:
    ranks = [at(rank, {DEFAULT: 12, OWN: 5}, OWN, phase=VOTE) for rank in range(3)]
    assert culprit([*ranks, at(3, {DEFAULT: 12, OWN: 4})]).ranks == (3,)


def test_a_silent_rank_is_the_culprit_wherever_the_others_are() -> None:
    ranks = [at(0, {DEFAULT: 12}, DEFAULT), at(1, {DEFAULT: 10}), at(2, {DEFAULT: 12}, DEFAULT, silent=True)]
    assert culprit(ranks).ranks == (2,)


def test_two_ranks_that_sleep() -> None:
    ranks = [at(0, {DEFAULT: 12}, DEFAULT), at(1, {DEFAULT: 10}), at(2, {DEFAULT: 11})]
    assert culprit(ranks).ranks == (1, 2)


def test_the_blame_is_followed_through_other_groups() -> None:
    """Rank 0 sleeps; 1 waits for it in their pair, and 2 and 3 wait for 1 in another group."""
    ranks = [
        at(0, {DEFAULT: 3, PAIRS: 4}),
        at(1, {DEFAULT: 3, PAIRS: 5, OTHERS: 2}, PAIRS),
        at(2, {DEFAULT: 3, OTHERS: 3}, OTHERS),
        at(3, {DEFAULT: 3, OTHERS: 3}, OTHERS),
    ]
    assert culprit(ranks).ranks == (0,)


def test_a_collective_that_one_rank_left_out_before_the_vote() -> None:
    ranks = [at(rank, {DEFAULT: 12, OWN: 4}, DEFAULT) for rank in range(3)]
    verdict = culprit([*ranks, at(3, {DEFAULT: 11, OWN: 5}, OWN, phase=VOTE)])
    assert verdict == ((3,), "did not enter the collective that 3 ranks wait in")


def test_a_collective_that_one_rank_left_out_before_another_one() -> None:
    """All are in the same phase: most ranks blame it, and it blames each of them."""
    ranks = [at(rank, {PAIRS: 5, DEFAULT: 12}, PAIRS) for rank in (1, 2, 3)]
    assert culprit([at(0, {PAIRS: 4, DEFAULT: 13}, DEFAULT), *ranks]).ranks == (0,)


def test_of_two_ranks_the_one_that_is_further_left_it_out() -> None:
    ranks = [at(0, {DEFAULT: 12, OWN: 4}, DEFAULT), at(1, {DEFAULT: 11, OWN: 5}, OWN, phase=VOTE)]
    assert culprit(ranks).ranks == (1,)
    assert culprit([at(0, {DEFAULT: 11}, DEFAULT, step=8), at(1, {DEFAULT: 10, OWN: 12}, OWN)]).ranks == (1,)


def test_of_two_ranks_in_one_phase_the_one_with_fewer_calls() -> None:
    ranks = [at(0, {PAIRS: 5, DEFAULT: 12}, PAIRS), at(1, {PAIRS: 3, DEFAULT: 13}, DEFAULT)]
    assert culprit(ranks).ranks == (1,)


def test_the_one_further_on_counts_more_than_many_who_wait_for_a_victim() -> None:
    """Rank 0 left out a collective with 1, which all others wait for in theirs, or at the vote."""
    ranks = [
        at(0, {PAIRS: 4, DEFAULT: 8, OWN: 6}, OWN, phase=VOTE),
        at(1, {PAIRS: 5, DEFAULT: 8, OTHERS: 2, OWN: 5}, PAIRS),
        at(2, {DEFAULT: 8, OTHERS: 3, OWN: 5}, OTHERS),
        at(3, {DEFAULT: 8, OTHERS: 3, OWN: 5}, OTHERS),
    ]
    assert culprit(ranks).ranks == (0,)


def test_ranks_whose_collectives_failed_against_each_other() -> None:
    """A collective left out on the vote's connections: gloo fails in all ranks, and nobody died."""
    ranks = [at(rank, {DEFAULT: 12, OWN: 4}, parked=True) for rank in range(3)]
    verdict = culprit([*ranks, at(3, {DEFAULT: 11, OWN: 5}, phase=VOTE, parked=True)])
    assert verdict == ((3,), "entered another collective than the others of its group")


def test_a_collective_left_out_before_another_one_of_the_same_group() -> None:
    """All have entered equally many, but one of them not the same."""
    ranks = [at(rank, {DEFAULT: 12}, DEFAULT, last=17) for rank in (0, 1, 3)]
    assert culprit([*ranks, at(2, {DEFAULT: 12}, DEFAULT, last=18)]).ranks == (2,)
    assert culprit([*ranks, at(2, {DEFAULT: 13}, DEFAULT, last=17)]).ranks == (2,), "it was let through once"
    assert culprit([ranks[0], at(2, {DEFAULT: 12}, DEFAULT, phase=VOTE, last=18)]).ranks == (2,)
    assert culprit([ranks[0], at(2, {DEFAULT: 11}, DEFAULT, last=18)]).ranks == (2,)


def test_different_collectives_say_nothing_while_a_member_waits_elsewhere() -> None:
    ranks = [
        at(0, {PAIRS: 5, DEFAULT: 12}, PAIRS, last=17),
        at(1, {PAIRS: 6, DEFAULT: 12}, PAIRS, last=18),
        at(2, {PAIRS: 4, DEFAULT: 13}, DEFAULT, phase=VOTE),
        at(3, {PAIRS: 5, DEFAULT: 12}, PAIRS, last=17),
    ]
    assert culprit(ranks).ranks == (2,)


def test_a_rank_that_owes_the_others_only_a_message() -> None:
    ranks = [at(0, {DEFAULT: 12}, PAIRS), at(1, {DEFAULT: 12})]
    verdict = culprit(ranks)
    assert verdict == ((1,), "does not wait for the others, as 1 rank does")


def test_all_in_the_same_collective() -> None:
    verdict = culprit([at(rank, {DEFAULT: 12}, DEFAULT) for rank in (2, 0, 1)])
    assert verdict.ranks == (0,)
    assert "a connection is dead" in verdict.reason


def test_all_compute() -> None:
    verdict = culprit([at(rank, {DEFAULT: 12}) for rank in range(3)])
    assert verdict == ((), "no rank waits in a collective: all of them compute")


def test_standings_travel_between_nodes() -> None:
    ranks = [at(0, {DEFAULT: 12, 1 << 62: 3}, 1 << 62), at(1, {}, parked=True)]
    assert msgspec.json.decode(msgspec.json.encode(ranks), type=list[Standing]) == ranks
