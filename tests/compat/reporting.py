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

`make compat` writes this page. Every client, unmodified and at the version given, performs every job of
`tests/compat/jobs.py` over plain HTTP and over TLS, and the bytes are compared with what another client
reads. ✓ works; – the client has no such call; † something prevents it (see below).
[Clients](clients.md) shows how to set each of them up.
"""
_MEANINGS = """
| job | what the client does |
|---|---|
| bucket | creates it, finds it in the list of buckets, removes it |
| empty, small | writes 0, 1 and 70,001 bytes; the client and another one read them back |
| multipart, streamed | writes 17 MiB in parts; 1 kB and 11 MiB from a pipe of unknown length |
| odd keys | space `+ ; @ : $ ' ( ) ! * ~ % # ? & = , [ ] { } \\| ^ %41`, Unicode: written, read, listed |
| metadata | writes two custom headers and a Content-Type, and shows them as written |
| checksums | uses every algorithm that it supports; each is compared with the stored value |
| range | reads the first, last and middle bytes |
| list, pages | lists recursively and by `/`, with spaces and Unicode; 1,203 keys |
| copy | copies 0 bytes, 100 kB, 17 MiB; odd keys on both sides; keeps metadata |
| delete many | deletes six keys at once, including odd ones; a seventh stays |
| presign | a program that does not know S3 reads (and writes, also a part); a modified URL is refused |
| conditional | writes if absent (the first wins), and if unchanged |
| sync | uploads a folder, uploads it again (nothing is sent), downloads it |
| own work | does what it is made for: data sets, arrays, tables, checkpoints |
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
        text += ["## What prevents some jobs", "", "| client | job | reason |", "|---|---|---|"]
        text += [f"| {name} | {job} | {why} |" for (name, job), why in [*GAPS.items(), *QUIRKS.items()]]
        text.append("")
    return "\n".join(text)
