"""`python -m tests.compat`: every client, every job, over HTTP and TLS; a matrix, and docs/compatibility.md.

Exits with 1 when something failed that is not listed in gaps.py, or when something listed passed.
"""

from __future__ import annotations

import argparse
import ssl
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.compat.clients import CLIENTS, DEV, HOMES
from tests.compat.gaps import expected
from tests.compat.homes import build, build_node
from tests.compat.jobs import JOBS
from tests.compat.reporting import matrix, page
from tests.compat.suites.pages import KEPT, PAGE, kept, with_suites
from tests.compat.working import Ground, Outcome, conversation, fill, judged
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.compat.clients import Client

DOORS = ("http", "https")
MARKS = {"ok": "✓", "cannot": "–", "failed": "✗"}


def main() -> int:
    options = _options()
    clients = [client for client in CLIENTS if not options.client or client.name in options.client]
    for home in sorted({client.home for client in clients} - {DEV}):
        (build_node if home == "node" else build)(home, HOMES[home])
    jobs = options.job or list(JOBS)
    results: dict[str, dict[tuple[str, str], Outcome]] = {}
    versions: dict[str, str] = {}
    for door in options.door:
        seen, told = over(door, clients, jobs)
        results[door], versions = seen, versions | told
        print(f"\nover {door}\n{matrix(seen, jobs)}", flush=True)
    complaints = [
        f"{door}: {name}: {job}: {complaint}"
        for door, seen in results.items()
        for (name, job), outcome in seen.items()
        if (complaint := _complaint(name, job, outcome))
    ]
    print("\n".join(complaints))
    whole = not (options.client or options.job) and len(options.door) == len(DOORS)
    if whole and not complaints:
        PAGE.write_text(with_suites(page(results, versions), kept(KEPT)))
    return 1 if complaints else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description=__doc__)
    parser.add_argument("--client", action="append", choices=[client.name for client in CLIENTS])
    parser.add_argument("--job", action="append", choices=list(JOBS))
    parser.add_argument("--door", action="append", choices=DOORS)
    options = parser.parse_args()
    options.door = options.door or list(DOORS)
    return options


def over(
    door: str, clients: Sequence[Client], jobs: Sequence[str]
) -> tuple[dict[tuple[str, str], Outcome], dict[str, str]]:
    """Outcomes by (client, job), and the clients' versions."""
    seen: dict[tuple[str, str], Outcome] = {}
    versions: dict[str, str] = {}
    with (
        tempfile.TemporaryDirectory(prefix="compat-") as scratch,
        Daemon.start(tls=door == "https") as daemon,
    ):
        ca, folder = daemon.ca_cert, Path(scratch)
        trust = ssl.create_default_context(cafile=ca) if ca else None
        s3 = daemon.client()
        ground = Ground(s3, fill(daemon, s3), folder / "work", trust)
        for number, client in enumerate(clients):
            if ca and client.untrusting:
                seen |= {(client.name, job): Outcome("cannot", client.untrusting) for job in jobs}
                continue
            with conversation(client, daemon, folder / f"{number}") as talk:
                versions[client.name] = talk.version
                for job in jobs:
                    seen[client.name, job] = judged(job, talk, ground)
            print(_line(client.name, [seen[client.name, job] for job in jobs]), flush=True)
    return seen, versions


def _line(name: str, outcomes: Sequence[Any]) -> str:
    return f"{name:20} " + "".join(MARKS[outcome.verdict] for outcome in outcomes)


def _complaint(name: str, job: str, outcome: Outcome) -> str:
    why = expected(name, job)
    if outcome.verdict == "failed" and not why:
        return outcome.why
    if outcome.verdict == "ok" and why:
        return f"passes; take it off the list in gaps.py ({why})"
    return ""


if __name__ == "__main__":
    sys.exit(main())
