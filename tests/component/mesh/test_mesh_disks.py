"""One disk of several is lost in a mesh of real daemons: what lay on it comes back from other owners."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import threading
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import pytest
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from click.testing import CliRunner

import meshsdk
from meshd.config import StoreSettings
from meshd.store.tools.fsck import check_store
from meshsdk.cli.cluster import cluster
from meshwire.cluster import compute_placement as place_by
from meshwire.cluster import slot_of
from tests.support.bounded_wait import await_end, await_true
from tests.support.daemon_cluster import DaemonCluster
from tests.support.daemons import DaemonFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.daemons import Daemon

NODES = ("n1", "n2", "n3")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disks")


@pytest.fixture(scope="module")
def started(place: Path) -> Iterator[DaemonCluster]:
    disks = [word for name in ("one", "two") for word in ("--disk", str(place / "n2-disks" / name))]
    with DaemonCluster.start(3, place, workers=2, own={"n2": disks, "n3": ["--domain", "s3.odd"]}) as found:
        found["n1"].client().create_bucket(Bucket="disks")
        yield found


@pytest.fixture
def mesh(started: DaemonCluster) -> DaemonCluster:
    return started.await_healthy()


def _disk(place: Path, name: str) -> Path:
    return place / "n2-disks" / name


def _patient(daemon: Daemon) -> Any:
    return daemon.client(config=Config(retries={"mode": "standard", "total_max_attempts": 8}))


def _fill(mesh: DaemonCluster, count: int, prefix: str) -> dict[str, bytes]:
    client, bodies = _patient(mesh["n1"]), {}
    for number in range(count):
        key = f"{prefix}-{number}"
        bodies[key] = os.urandom((900, 40_000, 300_000, 3 << 20)[number % 4])
        client.put_object(Bucket="disks", Key=key, Body=bodies[key])
    return bodies


def _downloaded(client: Any, key: str) -> bytes:
    """As most clients read: what breaks off in the middle is asked for again."""
    found = io.BytesIO()
    client.download_fileobj("disks", key, found, Config=TransferConfig(use_threads=False))
    return found.getvalue()


def _read_everywhere(mesh: DaemonCluster, bodies: dict[str, bytes]) -> None:
    for name in NODES:
        client = mesh[name].client()
        for key, body in bodies.items():
            assert client.get_object(Bucket="disks", Key=key)["Body"].read() == body, (name, key)
            part = client.get_object(Bucket="disks", Key=key, Range="bytes=100-299")["Body"].read()
            assert part == body[100:300], (name, key)


def _status(mesh: DaemonCluster) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(mesh["n1"].request("GET", "/-/cluster").body)
    return found


def _scrub(mesh: DaemonCluster) -> dict[str, Any]:
    """What n2 says of its disks and its quarantine."""
    found: dict[str, Any] = next(node["scrub"] for node in _status(mesh)["nodes"] if node["id"] == "n2")
    return found


def _env(mesh: DaemonCluster) -> dict[str, str]:
    return {
        "MESH_ENDPOINT": mesh["n1"].endpoint,
        "AWS_ACCESS_KEY_ID": mesh.access_key,
        "AWS_SECRET_ACCESS_KEY": mesh.secret_key,
    }


def _await(mesh: DaemonCluster, wanted: Callable[[], bool]) -> None:
    await_true(wanted, told=mesh.output)


def _is_whole(mesh: DaemonCluster) -> bool:
    """Both disks of n2 are in service, and it lacks nothing."""
    told = _scrub(mesh)
    return (
        len(told["disks"]) == 2
        and all(disk["serves"] for disk in told["disks"])
        and not told["quarantined"]
        and mesh.metric("n2", "meshd_store_disks_lost") == 0
    )


def _data_files(root: Path) -> int:
    return sum(1 for _ in root.glob("extents/*/*.tar"))


def test_a_node_starts_without_a_disk_and_gets_back_what_was_on_it(mesh: DaemonCluster, place: Path) -> None:
    bodies = _fill(mesh, 24, "killed")
    mesh.kill("n2")
    kept = _data_files(_disk(place, "one"))
    assert kept
    assert _data_files(_disk(place, "two"))
    shutil.rmtree(_disk(place, "two"))
    mesh.up("n2")
    _read_everywhere(mesh, bodies)
    bodies |= _fill(mesh, 4, "meanwhile")
    _await(mesh, lambda: _data_files(_disk(place, "two")) > 0 and _is_whole(mesh))
    mesh.await_state("n2", "up")
    _read_everywhere(mesh, bodies)
    assert _data_files(_disk(place, "one")) >= kept


def test_a_node_starts_while_a_disk_gives_errors(mesh: DaemonCluster, place: Path) -> None:
    """After the machine went down: nothing is known of the cache's disks any more."""
    bodies, two = _fill(mesh, 8, "errors"), _disk(place, "two")
    mesh.kill("n2")
    shutil.rmtree(two)
    two.symlink_to(two.name)  # whoever looks gets an error, root too
    (mesh["n2"].data_dir / "cache" / "boot").write_text("another")
    mesh.up("n2")
    _read_everywhere(mesh, bodies)
    _await(mesh, lambda: mesh.metric("n2", "meshd_store_disks_lost") == 1)
    _await(mesh, lambda: [disk["serves"] for disk in _scrub(mesh)["disks"]] == [True, False])
    told = CliRunner().invoke(cluster, ["status"], env=_env(mesh)).output
    assert "put an empty disk in its place" in told
    assert "cannot be read (" in mesh["n2"].output()
    two.unlink()
    two.mkdir()
    _await(mesh, lambda: _is_whole(mesh))
    _read_everywhere(mesh, bodies)


def test_a_disk_emptied_under_a_running_node(mesh: DaemonCluster, place: Path) -> None:
    bodies = _fill(mesh, 12, "emptied")
    over, wrong = threading.Event(), list[str]()
    lost_before = mesh.metric("n2", "meshd_quarantined_total")

    def read() -> None:
        with ExitStack() as stack:
            clients = [stack.enter_context(closing(_patient(mesh[name]))) for name in NODES]
            while not over.is_set():
                for key, body in bodies.items():
                    wrong.extend(key for client in clients if _downloaded(client, key) != body)
                    over.wait(0.05)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        shutil.rmtree((_disk(place, "one") / "extents").rename(place / "one-gone"))
        written = _fill(mesh, 8, "written")
        _await(mesh, lambda: mesh.metric("n2", "meshd_quarantined_total") > lost_before)
        _await(mesh, lambda: _data_files(_disk(place, "one")) > 0 and _is_whole(mesh))
    finally:
        over.set()
        await_end(reader)
    assert wrong == []
    _read_everywhere(mesh, bodies | written)


def _make_plans(mesh: DaemonCluster, seeds: range) -> list[str]:
    """Documents of the mesh itself: each node stores them by itself, in either of its disks."""
    node = mesh["n1"]
    with meshsdk.connect(node.endpoint, access_key=node.access_key, secret_key=node.secret_key) as client:
        for number in range(4):
            client.put("disks", f"samples/{number}.bin", bytes([number]) * 100)
        dataset = meshsdk.open("s3://disks/samples/", {"data": "bin"}, client=client)
        plans = []
        for seed in seeds:
            with meshsdk.Loader(dataset, 2, seed=seed, shuffle=True, output="numpy") as loader:
                plans.append(loader.plan.hash)
    return plans


def test_documents_of_the_mesh_on_a_lost_disk_come_back(mesh: DaemonCluster, place: Path) -> None:
    """Nobody reads them: the quarantine ends all the same, and with it the alert DamagedData."""
    plans = _make_plans(mesh, range(12))
    assert len(set(plans)) == 12
    mesh.kill("n2")
    shutil.rmtree(_disk(place, "two"))
    mesh.up("n2")
    _await(mesh, lambda: "documents left quarantine" in mesh["n2"].output())
    _await(mesh, lambda: mesh.metric("n2", "meshd_store_quarantined") == 0 and _is_whole(mesh))
    for digest in plans:
        assert mesh["n2"].request("GET", f"/-/plans/{digest}").status == 200


def test_a_disk_that_has_the_only_copy_is_not_given_up_unasked(mesh: DaemonCluster, place: Path) -> None:
    _fill(mesh, 8, "asked")
    mesh.kill("n2")
    mesh.await_state("n2", "away")
    listed = mesh["n1"].client().list_objects_v2(Bucket="disks")["Contents"]
    placement = place_by(mesh.map_of(), 2, "present")
    slots = {found["Key"]: slot_of("disks", found["Key"], len(placement.table)) for found in listed}
    short = [
        key for key, slot in slots.items() if "n2" in {n.node_id for n in placement.owners_of_slot(slot)}
    ]
    _await(mesh, lambda: _status(mesh)["debt"] == len(short) > 0)
    told = CliRunner().invoke(cluster, ["status"], env=_env(mesh)).output
    assert f"{len(short)} objects with fewer copies than required" in told
    assert re.search(r"^n2 +away .* 2/2 \d+% ", told, re.M), told
    assert re.search(
        r"^n3 .*was started with other domains than most nodes, which have no --domain", told, re.M
    )
    mesh.kill("n3")
    mesh.await_state("n3", "away")
    moved = _disk(place, "two").rename(place / "two-moved")
    try:
        with pytest.raises(
            DaemonFailedError, match=r"two is missing, and by the cluster map no available node"
        ):
            mesh.up("n2")
    finally:
        shutil.rmtree(_disk(place, "two"))  # made anew, and empty
        moved.rename(_disk(place, "two"))


def test_fsck_agrees_when_all_is_over(mesh: DaemonCluster, place: Path) -> None:
    for name in NODES:
        mesh.stop(name)
    disks = (_disk(place, "one"), _disk(place, "two"))
    assert check_store(StoreSettings.at(mesh["n2"].data_dir, disks=disks)).problems == []
