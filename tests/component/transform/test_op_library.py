"""`GET /-/ops`, and `mesh op`: the node tells what it can do."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

import pytest

from meshd.transform import registry
from meshsdk.admin import op_catalog
from meshsdk.cli import run
from meshsdk.client.s3_client import connect
from meshsdk.errors import NotFoundError

if TYPE_CHECKING:
    from tests.support.daemons import Daemon


@pytest.fixture
def environment(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_ENDPOINT", daemon.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", daemon.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", daemon.secret_key)


@pytest.mark.usefixtures("environment")
def test_the_node_lists_what_its_registry_has() -> None:
    with connect() as client:
        lines = op_catalog.list_ops(client.transport)
        assert {line.op for line in lines} >= {op.name for op in registry.latest()} - {"test_broken"}
        found = op_catalog.show_op(client.transport, "random_resized_crop")
    assert [item.name for item in found.arguments] == ["size", "scale", "ratio", "filter"]
    assert [item.required for item in found.arguments] == [True, False, False, False]
    assert found.random
    assert found.gives == "the same dtype [height, width, c]"


@pytest.mark.usefixtures("environment")
def test_an_unknown_op_names_the_nearest() -> None:
    with connect() as client, pytest.raises(NotFoundError, match="random_crop"):
        op_catalog.show_op(client.transport, "random_cropp")


def test_strangers_are_not_told(daemon: Daemon) -> None:
    with contextlib.closing(daemon.connect()) as connection:
        connection.request("GET", "/-/ops")
        assert connection.getresponse().status == 403


@pytest.mark.usefixtures("environment")
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["op", "ls", "crop", "--json"]) == 0
    names = [json.loads(line)["op"] for line in capsys.readouterr().out.splitlines()]
    assert {"center_crop", "random_crop", "random_resized_crop"} <= set(names)
    assert "to_npy" not in names
    assert run(["op", "show", "encode"]) == 0
    page = capsys.readouterr().out
    assert "--op 'encode format=jpeg'" in page
    assert "[default: 90]" in page
    assert run(["op", "show", "mixup"]) == 0
    page = capsys.readouterr().out
    assert "in a plan: ds.map(ops.mixup(FIELD))" in page
    assert "--op" not in page, "a view has no second row"
    assert run(["op", "show", "resise"]) == 3
    assert "resize" in capsys.readouterr().err
