"""Code blocks of a Markdown page, and a process that runs them in order.

A block is run when its language is `python`, `bash` or `console` (there, the lines after `$ `). All blocks of
a page run in one process, so a later block sees the names, files and exported variables of an earlier one. A
block is left out by the line before it: `<!-- not run: REASON -->`; the reason is required.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.support.interpreters import python

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

RUNNABLE = ("python", "bash", "console")
ALIASES = dict.fromkeys(("sh", "shell", "zsh"), "bash") | dict.fromkeys(("py", "python3", "pycon"), "python")
_FENCE = re.compile(r"^(\s*)(`{3,})\s*(\S*)(.*)$")
_MARK = re.compile(r"^\s*<!--\s*not run\b:?\s*(.*?)\s*-->\s*$")
_SHORTEST_REASON = 10
_LATE = 124  # as timeout(1) has it
PATIENCE = 400
"""Seconds a page may take: some start several nodes, on a machine that may be busy."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The page's exit code and all it printed."""

    code: int
    output: str


class PageError(ValueError):
    """A page breaks a rule of its blocks; the message names page and line."""


@dataclass(frozen=True, slots=True)
class Block:
    """One runnable block. `line` is that of its fence; `reason` is empty when it is to be run."""

    page: str
    line: int
    language: str
    text: str
    reason: str = ""


def _mark(lines: Sequence[str], at: int) -> str | None:
    """The reason given on the last line that is not blank before `at`; None without a mark."""
    before = [line for line in lines[:at] if line.strip()][-1:]
    match = _MARK.match(before[0]) if before else None
    return match[1] if match else None


def _reason(page: str, line: int, reason: str | None) -> str:
    if reason is not None and len(reason) < _SHORTEST_REASON:
        raise PageError(f"{page}:{line}: say why the block is not run: <!-- not run: REASON -->")
    return reason or ""


def blocks(page: str, text: str) -> Iterator[Block]:
    """The runnable blocks of a page in order. Raises PageError for an unclosed fence or a mark without
    reason.
    """
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        match = _FENCE.match(lines[at])
        if not match:
            at += 1
            continue
        start, indent, fence, language = at, match[1], match[2], match[3].lower()
        end = next((n for n in range(at + 1, len(lines)) if lines[n].strip() == fence), None)
        if end is None:
            raise PageError(f"{page}:{start + 1}: the block is not closed")
        if language in ALIASES:
            raise PageError(f"{page}:{start + 1}: write {ALIASES[language]}, so that the block is run")
        if language in RUNNABLE:
            body = "\n".join(line.removeprefix(indent) for line in lines[start + 1 : end])
            reason = _reason(page, start + 1, _mark(lines, start))
            yield Block(page, start + 1, language, body, reason)
        at = end + 1


def shell_text(block: Block) -> str:
    """What bash is given: all of a bash block, the `$ ` and `> ` lines of a console block."""
    if block.language == "bash":
        return block.text
    return "\n".join(line[2:] for line in block.text.splitlines() if line.startswith(("$ ", "> ")))


def script(page_blocks: Sequence[Block]) -> str:
    """A Python program that runs the blocks in order and prints the fence's line before each."""
    parts = ["from docs_running import run_python, run_shell"]
    for block in (block for block in page_blocks if not block.reason):
        name = "run_python" if block.language == "python" else "run_shell"
        text = block.text if block.language == "python" else shell_text(block)
        parts.append(f"{name}({f'{block.page}:{block.line}'!r}, {text!r})")
    return "\n".join(parts)


def run_page(
    page_blocks: Sequence[Block], folder: Path, env: dict[str, str], patience: float = PATIENCE
) -> Outcome:
    """Run the page in `folder`; programs it left in the background are ended. One that takes longer than
    `patience` has failed, with what it printed until then."""
    paths = [os.path.dirname(__file__), *filter(None, [os.environ.get("PYTHONPATH")])]
    log = folder.with_suffix(".log")
    with log.open("wb") as out:
        page = subprocess.Popen(
            [python(), "-c", script(page_blocks)],
            cwd=folder,
            env={**os.environ, **env, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code, late = _LATE, f"\nthe page had not ended after {patience:g} s: see the last line with ---"
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code, late = page.wait(patience), ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(page.pid, signal.SIGKILL)
            page.wait(60)
    return Outcome(code, log.read_text(errors="replace") + late)
