"""Unmodified clients do all in the table of jobs: those that are installed with the development tools."""

from __future__ import annotations

import contextlib
import ssl
from typing import TYPE_CHECKING, Any

import pytest

from tests.compat.clients import CLIENTS, DEV
from tests.compat.gaps import GAPS, QUIRKS, expected
from tests.compat.jobs import JOBS
from tests.compat.working import Ground, conversation, fill, judged
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from pathlib import Path

    from tests.compat.clients import Client
    from tests.compat.talking import Conversation

HERE = [client for client in CLIENTS if client.home == DEV and not client.slow]


@pytest.fixture(scope="module")
def many(daemon: Daemon, s3: Any) -> str:
    return fill(daemon, s3)


@pytest.mark.timeout(600)  # some sixty programs are started, one after the other
@pytest.mark.parametrize("client", HERE, ids=lambda client: client.name)
def test_every_job(client: Client, daemon: Daemon, s3: Any, many: str, tmp_path: Path) -> None:
    with conversation(client, daemon, tmp_path / "scratch") as talk:
        check(client, talk, Ground(s3, many, tmp_path / "work"))


@pytest.mark.timeout(600)
def test_every_job_of_boto3_over_tls(tmp_path: Path) -> None:
    """Only there does it send its checksums in trailers."""
    client = next(client for client in HERE if client.name == "boto3")
    with Daemon.start(tls=True) as daemon, contextlib.closing(daemon.client()) as s3:
        trust = ssl.create_default_context(cafile=daemon.ca_cert)
        ground = Ground(s3, fill(daemon, s3), tmp_path / "work", trust)
        with conversation(client, daemon, tmp_path / "scratch") as talk:
            check(client, talk, ground)


def check(client: Client, talk: Conversation, ground: Ground) -> None:
    """Run all jobs; fail with each that went wrong, and with each that was expected to and did not."""
    done, wrong = 0, []
    for name in JOBS:
        why = expected(client.name, name)
        outcome = judged(name, talk, ground)
        if outcome.verdict == "failed" and not why:
            wrong.append(f"{name}: {outcome.why}")
        if outcome.verdict == "ok" and why:
            wrong.append(f"{name} passes; take it off the list in gaps.py ({why})")
        done += outcome.verdict == "ok"
    assert not wrong, "\n".join(wrong)
    assert done >= 5, "a client that can do next to nothing shows nothing"


def test_the_lists_name_clients_and_jobs() -> None:
    names = {client.name for client in CLIENTS}
    for client, job in [*GAPS, *QUIRKS]:
        assert client in names
        assert job in JOBS
