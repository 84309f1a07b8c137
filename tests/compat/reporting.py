"""What a run of the compatibility suite saw, as a matrix for the terminal and as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.compat.clients import CLIENTS
from tests.compat.gaps import GAPS, QUIRKS, expected
from tests.compat.jobs import JOBS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.compat.working import Outcome

    Outcomes = Mapping[tuple[str, str], Outcome]

_MARKS = {"ok": "✓", "cannot": "–", "failed": "✗"}
_HEAD = """# Clients

Written by `make compat`: every client, unmodified, at the version named, does every job of
`tests/compat/jobs.py` over plain HTTP and over TLS; the bytes are compared with what another client reads.
✓ done; – the client has no such call; † something is in the way (below). How to set one up:
[clients](clients.md).
"""
_MEANINGS = """
| job | what is done |
|---|---|
| bucket | made, found in the list of buckets, removed |
| empty, small | 0, 1 and 70,001 bytes, read back by the client and by another |
| multipart, streamed | 17 MiB in parts; 1 kB and 11 MiB from a pipe of unknown length |
| odd keys | space `+ ; @ : $ ' ( ) ! * ~ % # ? & = , [ ] { } \\| ^ %41`, unicode: written, read, listed |
| metadata | two headers of its own and a Content-Type, as written and as shown |
| checksums | every algorithm the client names, compared with the stored value |
| range | first, last and middle bytes |
| list, pages | recursive and by `/`, with spaces and unicode; 1,203 keys |
| copy | 0 bytes, 100 kB, 17 MiB; odd keys on both sides; metadata kept |
| delete many | six keys at once, odd ones among them; a seventh stays |
| presign | read (and written, as a part, too) by a program that knows no S3; a changed URL is refused |
| conditional | if absent: first wins; if unchanged |
| sync | a folder up, up again (nothing sent), down |
| own work | what the client is for: data sets, arrays, tables, checkpoints |
"""


def _mark(name: str, job: str, outcome: Outcome | None) -> str:
    if outcome is None:
        return " "
    if outcome.verdict == "failed" and expected(name, job):
        return "†"
    return _MARKS[outcome.verdict]


def _names(seen: Outcomes) -> list[str]:
    there = {name for name, _ in seen}
    return [client.name for client in CLIENTS if client.name in there]


def matrix(seen: Outcomes, jobs: Sequence[str]) -> str:
    """Clients down, jobs across."""
    lines = [" " * 20 + " ".join(f"{job[:8]:8}" for job in jobs)]
    for name in _names(seen):
        marks = " ".join(f"{_mark(name, job, seen.get((name, job))):8}" for job in jobs)
        lines.append(f"{name:20}{marks}".rstrip())
    return "\n".join(lines)


def page(results: Mapping[str, Outcomes], versions: Mapping[str, str]) -> str:
    """docs/compatibility.md."""
    text = [_HEAD]
    for door, seen in results.items():
        text.append(f"## Over {'TLS' if door == 'https' else 'plain HTTP'}\n")
        text.append(f"| | {' | '.join(JOBS)} |")
        text.append("|---" * (len(JOBS) + 1) + "|")
        for name in _names(seen):
            marks = " | ".join(_mark(name, job, seen.get((name, job))) for job in JOBS)
            text.append(f"| {name} {versions.get(name, '')} | {marks} |")
        text.append("")
    text += ["## What the jobs are", _MEANINGS]
    if QUIRKS or GAPS:
        text += ["## Where something is in the way", "", "| client | job | what |", "|---|---|---|"]
        text += [f"| {name} | {job} | {why} |" for (name, job), why in [*GAPS.items(), *QUIRKS.items()]]
        text.append("")
    return "\n".join(text)
