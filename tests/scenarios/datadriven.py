"""Stories as text: a command, perhaps lines of input, `----`, and what it must print.

    # a comment, kept
    kill rank=2 cause=signal
    ----
    rank 2 dies at UPDATE(7, chunk 1, torn)

Blocks are separated by empty lines. The style is that of etcd-io/raft's `testdata`, so that a story can be read, and
questioned, by someone who did not write the code. Set LETO_REWRITE_STORIES=1 to write what the code prints into the
files, then read the difference before you believe it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

REWRITE = "LETO_REWRITE_STORIES"
SEPARATOR = "----"


@dataclass(frozen=True)
class Block:
    """One command of a story: its comments, name, `key=value` arguments and bare words, input lines, expectation."""

    line: int
    comments: list[str]
    command: str
    input: list[str]
    expected: str

    @property
    def name(self) -> str:
        return self.command.split()[0]

    @property
    def words(self) -> list[str]:
        return [word for word in self.command.split()[1:] if "=" not in word]

    @property
    def arguments(self) -> dict[str, str]:
        return dict(word.split("=", 1) for word in self.command.split()[1:] if "=" in word)


@dataclass
class _Paragraph:
    line: int
    lines: list[str] = field(default_factory=list)


def parse(text: str) -> list[Block]:
    """The blocks of a story. Raises ValueError, with the line, for a block without its `----`."""
    paragraphs: list[_Paragraph] = []
    fresh = True
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            fresh = True
            continue
        if fresh:
            paragraphs.append(_Paragraph(number))
            fresh = False
        paragraphs[-1].lines.append(line)
    blocks: list[Block] = []
    pending: list[str] = []  # paragraphs that are only comments
    for paragraph in paragraphs:
        comments = [line for line in paragraph.lines if line.startswith("#")]
        rest = [line for line in paragraph.lines if not line.startswith("#")]
        if not rest:
            pending += [*comments, ""]
            continue
        if SEPARATOR not in rest:
            raise ValueError(f"line {paragraph.line}: no {SEPARATOR} after {rest[0]!r}")
        cut = rest.index(SEPARATOR)
        blocks.append(Block(paragraph.line, pending + comments, rest[0], rest[1:cut], "\n".join(rest[cut + 1 :])))
        pending = []
    return blocks


def run(path: Path, execute: Callable[[Block], str]) -> None:
    """Execute a story. Raises AssertionError at the first block that prints something else; or rewrites the file."""
    blocks = parse(path.read_text(encoding="utf-8"))
    assert blocks, f"{path.name} tells nothing"
    printed = [(block, execute(block).rstrip("\n")) for block in blocks] if REWRITE in os.environ else []
    if printed:
        path.write_text("\n".join(_format(block, text) for block, text in printed), encoding="utf-8")
        return
    for block in blocks:
        text = execute(block).rstrip("\n")
        assert text == block.expected, (
            f"{path.name}, line {block.line}: {block.command}\n--- expected\n{block.expected}\n--- printed\n{text}"
        )


def _format(block: Block, text: str) -> str:
    return "\n".join([*block.comments, block.command, *block.input, SEPARATOR, *([text] if text else []), ""])
