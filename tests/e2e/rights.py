"""What the operator and the daemons may do and what they did, by an audit log of the API server.

The log has lines of JSON, at level Metadata or above; `--audit-log FILE` of `python -m tests.e2e` names it. A
right is VERB RESOURCE[.GROUP]; names of single objects are not looked at. `bind` is never logged: the API
server asks for it when a RoleBinding is made.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from lightkube.resources.rbac_authorization_v1 import ClusterRole, Role

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.cluster_client import RealCluster

_AWAY, _START = timedelta(seconds=30), timedelta(seconds=10)
"""Without an event for so long, the API server was away; it has read all roles so long after its return."""
ACCOUNTS = {"operator": "mesh-shardmesh-operator", "daemon": "shardmesh-daemon"}


def granted(cluster: RealCluster) -> dict[str, set[str]]:
    """Return the rights of the release's roles, for `operator` and `daemon`."""
    found: dict[str, set[str]] = {}
    for kind in ACCOUNTS:
        names = {f"mesh-shardmesh-{kind}", f"mesh-shardmesh-{cluster.namespace}-{kind}"}
        roles = [*cluster.kube.list(ClusterRole), *cluster.kube.list(Role)]
        rules = [rule for role in roles if role.metadata.name in names for rule in role.rules or ()]
        found[kind] = {
            right(verb, resource, group)
            for rule in rules
            for group in rule.apiGroups or ()
            for resource in rule.resources or ()
            for verb in rule.verbs
        }
    return found


def used(log: Path) -> tuple[dict[str, set[str]], list[str]]:
    """Return the rights that were used, for `operator` and `daemon`, and what was refused to them by an API
    server that knew the roles: for a moment after its start, it refuses what they allow."""
    found: dict[str, set[str]] = {kind: set() for kind in ACCOUNTS}
    refused = set()
    for event, just_started in _events(log):
        account = event["user"]["username"].rpartition(":")[2]
        kinds = [kind for kind, name in ACCOUNTS.items() if name == account or account.endswith(f"-{kind}")]
        if not kinds or "objectRef" not in event:
            continue
        target = event["objectRef"]
        resource = target["resource"] + (f"/{target['subresource']}" if "subresource" in target else "")
        name = right(event["verb"], resource, target.get("apiGroup", ""))
        code = event["responseStatus"].get("code")
        if code == 403:
            refused |= set() if just_started else {f"{kinds[0]}: {name}"}
            continue
        found[kinds[0]].add(name)
        if event["verb"] == "patch" and code == 201:  # server-side apply: the API server asks for both
            found[kinds[0]].add(right("create", resource, target.get("apiGroup", "")))
    return found, sorted(refused)


def right(verb: str, resource: str, group: str) -> str:
    """Return the right's name."""
    return f"{verb} {resource}" + (f".{group}" if group else "")


def _events(log: Path) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield the events of service accounts, and whether the API server had just started: after a silence, for
    something asks it each second."""
    last = started = datetime.min.replace(tzinfo=UTC)
    with log.open() as lines:
        for line in lines:
            event = json.loads(line)
            now = datetime.fromisoformat(event["stageTimestamp"])
            if now - last > _AWAY:
                started = now
            last = max(last, now)
            if event["user"].get("username", "").startswith("system:serviceaccount:"):
                yield event, now - started < _START
