"""Fixtures of the tests with real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.runs import Outcome, Reference, steps_of, train


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The outcome of the undisturbed run on one node with these arguments, run once a session."""
    known: dict[tuple[int, tuple[str, ...]], Outcome] = {}

    def run(*args: str, nproc: int = 4, deadline: float = 90.0) -> Outcome:
        if (nproc, args) not in known:
            directory: Path = tmp_path_factory.mktemp("reference")
            with train(directory / "run", *args, nproc=nproc, deadline=deadline) as job:
                job.expect_success()
                assert not job.recoveries()
                known[nproc, args] = Outcome(job, steps_of(args), nproc)
        return known[nproc, args]

    return run
