"""Unmodified clients do all in the table of jobs: those that are installed with the development tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.compat.clients import CLIENTS, DEV
from tests.compat.gaps import expected
from tests.compat.jobs import JOBS
from tests.compat.working import conversation, fill, run_job

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from meshd.testing.daemons import Daemon
    from tests.compat.clients import Client
    from tests.compat.talking import Conversation

HERE = [client for client in CLIENTS if client.home == DEV and not client.slow]


@pytest.fixture(scope="module")
def many(daemon: Daemon, s3: Any) -> str:
    return fill(daemon, s3)


@pytest.fixture
def talk(request: pytest.FixtureRequest, daemon: Daemon, tmp_path: Path) -> Iterator[Conversation]:
    client: Client = request.param
    with conversation(client, daemon, tmp_path / "scratch") as running:
        yield running


@pytest.mark.parametrize("talk", HERE, ids=lambda client: client.name, indirect=True)
def test_every_job(
    talk: Conversation, s3: Any, many: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    client: Client = request.node.callspec.params["talk"]
    done, wrong = 0, []
    for name in JOBS:
        why = expected(client.name, name)
        try:
            outcome = run_job(name, talk, s3, many, tmp_path / "work")
        except Exception as error:
            if not why:
                wrong.append(f"{name}: {error}")
            continue
        if why:
            wrong.append(f"{name} passes; take it off the list in gaps.py ({why})")
        done += outcome.verdict == "ok"
    assert not wrong, "\n".join(wrong)
    assert done >= 5, "a client that can do next to nothing shows nothing"


def test_the_lists_name_clients_and_jobs() -> None:
    from tests.compat.gaps import GAPS, QUIRKS

    names = {client.name for client in CLIENTS}
    for client, job in [*GAPS, *QUIRKS]:
        assert client in names
        assert job in JOBS
