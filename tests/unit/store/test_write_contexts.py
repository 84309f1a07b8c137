"""Every write of a client's request passes its context on, and none in a ContextVar."""

from __future__ import annotations

import ast
from pathlib import Path

import meshd
from meshd.store.records import INTERNAL_WRITE, NO_DEADLINE, WriteContext

ROOT = Path(meshd.__file__).parent
REQUEST_PATH = (
    *sorted((ROOT / "server").rglob("*.py")),
    *sorted((ROOT / "cluster/replication").rglob("*.py")),
    *sorted(path for path in (ROOT / "objects").rglob("*.py") if path.stem != "lifecycle_runner"),
    ROOT / "origins/backed_bucket_service.py",
    ROOT / "origins/write_back.py",
    ROOT / "origins/write_back_routing.py",
)
"""Modules that a write passes between the endpoint and the store."""
STORE_WRITES = frozenset(
    [
        "abort_upload",
        "amend",
        "apply_change",
        "check_conditions",
        "commit",
        "commit_at_stamp",
        "complete_upload",
        "create_upload",
        "delete_many",
        "delete_version",
        "link",
    ]
)
SERVICE_WRITES = frozenset(
    [
        "copy_object",
        "copy_part",
        "delete_bucket",
        "delete_object",
        "delete_objects",
        "delete_tags",
        "finish_write",
        "object_committed",
        "put_acl",
        "put_object",
        "put_part",
        "put_tags",
    ]
)
CONTEXT_VARIABLES = {
    "telemetry/logs.py",
    "telemetry/tracing.py",
    "util/tenant_limits.py",
    "views/view_kind.py",
}
"""Modules with a ContextVar: it labels log lines, metrics or spans, or says whose share of memory is used."""
WRITEBACK_CONTEXT = "origins/write_back.py:_push"


def _calls(path: Path) -> list[tuple[str, str, ast.Call]]:
    """The function, the name and the call of every method call."""
    tree, found = ast.parse(path.read_text()), list[tuple[str, str, ast.Call]]()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    found.append((function.name, node.func.attr, node))
    return found


def _is_write(name: str, call: ast.Call) -> bool:
    assert isinstance(call.func, ast.Attribute)
    receiver = ast.unparse(call.func.value).rpartition(".")[2].strip("_")
    if name == "delete":
        return receiver in {"store", "shared", "replicated"}
    return name in STORE_WRITES | SERVICE_WRITES and receiver != "os"


def test_every_write_of_a_request_passes_its_context_on() -> None:
    checked, missing = 0, set[str]()
    for path in REQUEST_PATH:
        for function, name, call in _calls(path):
            if _is_write(name, call):
                checked += 1
                if not any(keyword.arg == "context" for keyword in call.keywords):
                    missing.add(f"{path.relative_to(ROOT)}:{function}")
    assert checked > 50
    assert missing == {WRITEBACK_CONTEXT}  # removes what the origin has: no client waits for it


def test_no_context_variable_carries_what_a_write_depends_on() -> None:
    users = [path for path in ROOT.rglob("*.py") if "ContextVar(" in path.read_text()]
    assert {str(path.relative_to(ROOT)) for path in users} == CONTEXT_VARIABLES


def test_a_fence_keeps_where_the_write_comes_from() -> None:
    accepted = WriteContext("n1", 7)
    fenced = accepted.under_fence(8, 100)
    assert (fenced.accepted_by, fenced.map_version, fenced.epoch) == ("n1", 7, 8)
    assert [fenced.is_past_deadline(stamp) for stamp in (99, 100, 101)] == [False, False, True]
    assert not INTERNAL_WRITE.is_past_deadline(NO_DEADLINE)
    assert accepted.epoch == 0
