"""DeleteObjects in a mesh while the primary of some of the keys is away, or cannot delete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

from tests.support.daemon_cluster import DaemonCluster

if TYPE_CHECKING:
    from collections.abc import Iterator

NODES, EACH = ("n1", "n2", "n3"), 3


@pytest.fixture(scope="module")
def mesh() -> Iterator[DaemonCluster]:
    with DaemonCluster.start(3, args=("--copies", "1")) as found:
        found["n1"].client().create_bucket(Bucket="deletions")
        yield found


def put(mesh: DaemonCluster, prefix: str) -> dict[str, list[str]]:
    """Objects of each primary: their keys."""
    client, made = mesh["n1"].client(), {}
    for node in NODES:
        names = [f"{prefix}-{number}-{node}" for number in range(EACH)]
        made[node] = [mesh.key_with_primary(node, "deletions", name, copies=1) for name in names]
        for key in made[node]:
            client.put_object(Bucket="deletions", Key=key, Body=b"x")
    return made


def delete(client: Any, keys: list[str], *, quiet: bool = False) -> tuple[list[str], dict[str, str]]:
    """Keys that are deleted, and the codes of those that are not."""
    wanted = {"Objects": [{"Key": key} for key in keys], "Quiet": quiet}
    answer = client.delete_objects(Bucket="deletions", Delete=wanted)
    deleted = [entry["Key"] for entry in answer.get("Deleted", [])]
    return deleted, {entry["Key"]: entry["Code"] for entry in answer.get("Errors", [])}


@pytest.mark.parametrize("how", ["away", "refuses"])
def test_keys_of_other_primaries_are_deleted(mesh: DaemonCluster, how: str) -> None:
    keys = put(mesh.await_healthy(), how)
    every = [key for number in range(EACH) for key in (keys[node][number] for node in NODES)]
    client = mesh["n1"].client()
    mesh.stop("n3")
    if how == "refuses":
        mesh["n3"].env["MESHD_FAILPOINTS"] = "store.delete.placed=error(30)"
        mesh.up("n3")
        del mesh["n3"].env["MESHD_FAILPOINTS"]
        mesh.await_state("n3", "up")
    deleted, errors = delete(client, every)
    assert deleted == [key for key in every if key not in keys["n3"]]
    assert list(errors) == keys["n3"]
    assert set(errors.values()) <= {"SlowDown", "InternalError"}
    if how == "refuses":
        quiet = delete(client, [*keys["n1"], *keys["n3"]], quiet=True)
        assert (quiet[0], list(quiet[1])) == ([], keys["n3"])
        with pytest.raises(ClientError) as caught:  # nothing is deleted: clients repeat it
            delete(client, keys["n3"])
        assert caught.value.response["Error"]["Code"] == "SlowDown"
    mesh.stop("n3")
    mesh.up("n3")
    mesh.await_healthy()
    assert delete(client, every) == (every, {})
