"""A `leto` group gives the bits that torch's own gloo group gives."""

from __future__ import annotations

import pytest

from tests.process.comm_ranks import run_script


@pytest.mark.process
@pytest.mark.parametrize("what", ["collectives", "models"])
def test_same_bits_as_plain_gloo(what: str) -> None:
    result = run_script("comm_collectives.py", what)
    assert result["wrong"] == [[], [], [], []]
    assert result["exits"] == [0, 0, 0, 0]
