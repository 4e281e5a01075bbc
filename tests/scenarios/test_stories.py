"""Runs every `*.txt` of this directory, those about several nodes in `nodes/`, and checks the runner itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios import datadriven
from tests.scenarios.agents_story import AgentsStory
from tests.scenarios.datadriven import Block
from tests.scenarios.story import Story

STORIES = sorted(Path(__file__).parent.glob("*.txt"))
NODES = sorted(Path(__file__).parent.glob("nodes/*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path: Path, tmp_path: Path) -> None:
    datadriven.run(path, Story(tmp_path).execute)


@pytest.mark.parametrize("path", NODES, ids=lambda path: path.stem)
def test_story_of_nodes(path: Path, tmp_path: Path) -> None:
    datadriven.run(path, AgentsStory(tmp_path).execute)


def echo(block: Block) -> str:
    return "\n".join([*block.words, *sorted(block.arguments.values()), *block.input])


def test_a_story_that_is_told_otherwise_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(datadriven.REWRITE, raising=False)
    path = tmp_path / "story.txt"
    path.write_text("echo a=1 b\ninput\n----\nb\n1\ninput\n\necho c\n----\nd\n")
    with pytest.raises(AssertionError, match=r"story\.txt, line 8: echo c"):
        datadriven.run(path, echo)


def test_rewriting_keeps_comments_and_is_stable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(datadriven.REWRITE, "1")
    path = tmp_path / "story.txt"
    path.write_text("# title\n\n# why\necho a=1 b\ninput\n----\nwrong\n\n\necho\n----\n")
    datadriven.run(path, echo)
    once = path.read_text()
    assert once == "# title\n\n# why\necho a=1 b\ninput\n----\nb\n1\ninput\n\necho\n----\n"
    datadriven.run(path, echo)
    assert path.read_text() == once
    monkeypatch.delenv(datadriven.REWRITE)
    datadriven.run(path, echo)


def test_a_block_without_its_separator_is_an_error() -> None:
    with pytest.raises(ValueError, match="line 4: no ---- after 'b'"):
        datadriven.parse("a\n----\n\nb\n")
