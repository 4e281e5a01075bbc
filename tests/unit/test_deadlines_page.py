"""docs/deadlines.md has every wait of the policy, with its default, and every order that is refused."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from leto_elastic.recovery.policy import _ORDER, CoordinatorPolicy, Deadlines, HangPolicy, Policy, Section

PAGE = (Path(__file__).parents[2] / "docs" / "deadlines.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def rows(text: str) -> dict[str, list[str]]:
    """Cells by the first one, of the rows of a table whose first cell is a key."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    ]
    return {row[0].strip("`"): row[1:] for row in cells}


def defaults(kind: type[Section]) -> dict[str, float]:
    return {field.encode_name: getattr(kind(), field.name) for field in msgspec.structs.fields(kind)}


def test_every_deadline_is_there_and_nothing_else() -> None:
    assert {key: float(row[0]) for key, row in rows(section("`deadlines`")).items()} == defaults(Deadlines)


def test_every_limit_of_a_hang_is_there() -> None:
    told = {key: float(row[0]) for key, row in rows(section("`hang`")).items()}
    expected = defaults(HangPolicy)
    factor = expected.pop("factor")
    assert told == expected
    assert f"`factor` ({factor:g})" in section("`hang`")


def test_the_other_waits_are_there() -> None:
    told = {key: float(row[0]) for key, row in rows(section("`coordinator`, `limits`, `shadow`")).items()}
    policy = Policy()
    assert told == {
        "coordinator.lease": policy.coordinator.lease,
        "coordinator.collect_ms": policy.coordinator.collect_ms / 1000,
        "limits.per_window.seconds": policy.limits.per_window.seconds,
        "shadow.retry_after": policy.shadow.retry_after,
    }
    assert {key.removeprefix("coordinator.") for key in told if key.startswith("coordinator.")} == set(
        defaults(CoordinatorPolicy)
    )


@pytest.mark.parametrize(("shorter", "longer", "why"), _ORDER)
def test_every_order_is_there(shorter: str, longer: str, why: str) -> None:
    lines = [line for line in section("Out of order").splitlines() if f"`deadlines.{longer}`" in line and why in line]
    assert any(re.search(rf"`(deadlines\.)?{shorter}`", line) for line in lines), (shorter, longer)


def test_each_wait_says_what_happens_at_its_end() -> None:
    for title in ("`deadlines`", "`hang`", "`coordinator`, `limits`, `shadow`"):
        for key, row in rows(section(title)).items():
            assert len(row) == 3, key
            assert all(row), key
