"""The OpenAPI document of the native API, against what a node answers."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import jsonschema
from openapi_spec_validator import validate

from tests.support.console_browser import require_console
from tests.support.console_client import ConsoleClient
from tests.support.console_data import loader_of

if TYPE_CHECKING:
    import pytest

    from tests.support.daemons import Daemon

require_console()


def test_the_schema_of_the_native_api_says_what_the_node_answers(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loader_of(daemon, "s3://photos/train", monkeypatch) as loader:
        plan = loader.plan.hash
    document = json.loads(ConsoleClient.of(daemon).send("GET", "/-/openapi.json").body)
    validate(document)
    snapshot = json.loads(daemon.request("GET", f"/-/plans/{plan}").body)["snapshot"]
    known = {
        "plan": plan,
        "snapshot": snapshot,
        "epoch": "0",
        "step": "0",
        "bucket": "photos",
        "op": "resize",
    }
    operations = [
        (path, method.upper(), said)
        for path, each in document["paths"].items()
        for method, said in each.items()
    ]
    assert len(operations) > 70
    checked = 0
    for path, method, said in operations:
        assert "{rest}" not in path, "a handler has no description: @operation"
        target = re.sub(r"\{(\w+)\}", lambda found: known.get(found[1], "absent"), path)
        if method == "DELETE":
            target = target.replace(plan, "0" * 64).replace(snapshot, "0" * 64)
        answer = daemon.request(method, target, b"" if method in ("GET", "DELETE") else b"?")
        text = answer.body.decode(errors="replace").lower()
        assert "there is nothing at" not in text, f"no route answers {method} {path}"
        assert answer.status not in (405, 500), f"{method} {path}: {text}"
        shape = said["responses"].get("200", {}).get("content", {}).get("application/json", {}).get("schema")
        if method == "GET" and shape and answer.status == 200:
            schema = {**shape, "components": document["components"]}
            jsonschema.validate(json.loads(answer.body), schema)
            checked += 1
        for parameter in said["parameters"]:
            if method == "GET" and parameter["in"] == "query":
                told = daemon.request("GET", f"{target}?{parameter['name']}=1").body.decode(errors="replace")
                assert "unknown query parameter" not in told, f"{path} does not know {parameter['name']}"
    assert checked > 15
