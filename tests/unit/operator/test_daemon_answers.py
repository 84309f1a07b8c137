"""Answers that no daemon gives, as of a proxy in between: they fail one request, and not the operator."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from meshoperator.daemon_client import DaemonClient, DaemonError, MeshAccess


@pytest.mark.parametrize(
    "body", [b"<html>under maintenance</html>", b"{}", b"[]", b'{"map": {"nodes": [{}]}}']
)
def test_an_answer_that_is_no_map_is_an_error_of_that_daemon(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def exchange(*_: Any) -> tuple[int, bytes]:
        return 200, body

    async def check() -> None:
        kube: Any = SimpleNamespace()
        daemons = DaemonClient(kube, lambda: 1e9)
        monkeypatch.setattr(daemons, "_exchange", exchange)
        with pytest.raises(DaemonError, match="does not answer as a daemon does"):
            await daemons.access_daemons(MeshAccess("http://mesh:9000", "key", "secret"))

    asyncio.run(check())
