"""The example: what integrating leto costs, and a journal that writes each step once."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import lm

ROOT = Path(__file__).resolve().parents[2]


def test_integrating_leto_costs_at_most_five_lines() -> None:
    plain, leto = (
        [line.strip() for line in (ROOT / "examples" / name).read_text().splitlines()]
        for name in ("train_lm_plain.py", "train_lm.py")
    )
    changes = [line for line in difflib.unified_diff(plain, leto, n=0, lineterm="") if line[:2] not in ("--", "++")]
    added = [line for line in changes if line.startswith("+")]
    assert 0 < len(added) <= 5, added


@pytest.fixture
def journals(tmp_path: Path) -> Iterator[argparse.Namespace]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield argparse.Namespace(run_dir=tmp_path, steps=10)
    dist.destroy_process_group()


def step(number: int, *, rehearsal: bool = False) -> lm.Step:
    return lm.Step(number, (torch.tensor([number]), torch.zeros(1)), rehearsal)


def run(journal: lm.Journal, *numbers: int) -> None:
    for number in numbers:
        journal.begin(step(number), torch.tensor([100 + number, 200 + number]))
        journal.end(step(number), 1.0)


def lines(args: argparse.Namespace) -> list[str]:
    return (args.run_dir / "samples.rank0.txt").read_text().splitlines()


def test_a_step_that_is_run_again_is_written_once(journals: argparse.Namespace) -> None:
    journal = lm.Journal(journals)
    run(journal, 0)
    before = journal.state_dict()
    run(journal, 1)
    journal.load_state_dict(before)
    run(journal, 1, 2)
    journal.close()
    assert lines(journals) == ["0 100 200", "1 101 201", "2 102 202"]


@pytest.mark.parametrize("written", [True, False])
def test_a_replacement_goes_on_where_the_dead_process_ended(journals: argparse.Namespace, written: bool) -> None:
    dead = lm.Journal(journals)
    run(dead, 0, 1)
    handed_over = dead.state_dict()
    if written:  # it began step 2, so step 1 is in the file
        dead.begin(step(2), torch.tensor([102, 202]))
    replacement = lm.Journal(journals)
    replacement.begin(step(0, rehearsal=True), torch.tensor([0]))
    replacement.end(step(0, rehearsal=True), 1.0)
    replacement.load_state_dict(handed_over)
    run(replacement, 2, 3)
    replacement.close()
    assert lines(journals) == ["0 100 200", "1 101 201", "2 102 202", "3 103 203"]


def test_a_new_run_starts_its_file_anew(journals: argparse.Namespace) -> None:
    for _ in range(2):
        journal = lm.Journal(journals)
        run(journal, 0, 1)
        journal.close()
    assert lines(journals) == ["0 100 200", "1 101 201"]


def test_a_text_without_enough_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_bytes(b"x" * 64)
    with pytest.raises(SystemExit, match="64 bytes"):
        lm.Text(tmp_path / "short.txt", sequence=64)
    (tmp_path / "enough.txt").write_bytes(bytes(range(200)))
    text = lm.Text(tmp_path / "enough.txt", sequence=64)
    assert len(text) == 3
    assert text[2][0] == 128
    assert torch.equal(text[2][1], torch.arange(128, 193))
