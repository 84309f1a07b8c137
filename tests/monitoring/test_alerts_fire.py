"""Alerts that failures of real daemons bring about: a real Prometheus evaluates the shipped rules over their
metrics. Their `for:` is left out, since it would take minutes; test_rules.py has it, with made-up series."""

from __future__ import annotations

import shutil
import signal
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING

import pytest
from botocore.exceptions import ClientError

import meshsdk as mesh
from tests.monitoring.alert_watch import OF_THE_MACHINE, OF_TWO_POINTS, netloc, watched
from tests.monitoring.client_failures import ClientFailures, crowd
from tests.monitoring.node_work import work
from tests.monitoring.shipped_files import ALERTS
from tests.support.bounded_wait import await_true
from tests.support.certificates import Authority
from tests.support.daemon_cluster import DaemonCluster
from tests.support.daemons import Daemon
from tests.support.required import required_program
from tests.support.s3_raw import Wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.monitoring.alert_watch import Watch

pytestmark = required_program("prometheus", "apt install prometheus")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Daemon]]:
    """By what is the matter with them."""
    place = tmp_path_factory.mktemp("nodes")
    pair = Authority(place / "tls").issue(days=1)
    tls = ["--tls-cert", str(pair.cert), "--tls-key", str(pair.key)]
    with ExitStack() as stack:
        yield {
            "plain": stack.enter_context(Daemon.start()),
            "certificate": stack.enter_context(Daemon.start(args=tls)),
            "audit": stack.enter_context(Daemon.start(args=["--audit-log", "/dev/full"])),
            "crowded": stack.enter_context(Daemon.start(args=["--max-connections", "10"])),
        }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonCluster]:
    place = tmp_path_factory.mktemp("mesh")
    disks = [word for name in ("one", "two") for word in ("--disk", str(place / "disks" / name))]
    with DaemonCluster.start(3, place, own={"n1": disks}) as found:
        yield found


@pytest.fixture(scope="module")
def watch(
    nodes: dict[str, Daemon], cluster: DaemonCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watch]:
    with watched(tmp_path_factory.mktemp("prometheus"), [*nodes.values(), *cluster.nodes.values()]) as found:
        yield found


def test_all_is_silent_while_all_is_well(
    watch: Watch, nodes: dict[str, Daemon], cluster: DaemonCluster
) -> None:
    client = cluster["n1"].client()
    client.create_bucket(Bucket="mesh")
    for number in range(30):
        client.put_object(Bucket="mesh", Key=f"{number}", Body=b"1" * 1000)
    well = [nodes["plain"], *cluster.nodes.values()]

    def loud() -> set[str]:
        found = watch.firing().union(*[watch.firing(netloc(each)) for each in well])
        return found - OF_THE_MACHINE - OF_TWO_POINTS

    await_true(lambda: not loud(), told=loud)
    assert {each["alert"].removeprefix("Shardmesh") for each in ALERTS} >= OF_THE_MACHINE | OF_TWO_POINTS


def test_a_certificate_that_ends(watch: Watch, nodes: dict[str, Daemon]) -> None:
    watch.expect("CertificateExpires", "CertificateEnds", node=nodes["certificate"])


def test_an_audit_log_on_a_full_disk(watch: Watch, nodes: dict[str, Daemon]) -> None:
    nodes["audit"].client().list_buckets()
    watch.expect("AuditLost", node=nodes["audit"])


def test_bad_samples_and_a_job_that_fails(watch: Watch, nodes: dict[str, Daemon]) -> None:
    plain = nodes["plain"]
    assert "JobsFail" not in watch.firing(netloc(plain))
    work(plain.endpoint, plain.access_key, plain.secret_key)
    with mesh.connect(plain.endpoint, access_key=plain.access_key, secret_key=plain.secret_key) as client:
        failures = ClientFailures(client)
        failures.fail_job()
        watch.expect("JobsFail", node=plain)
        watch.expect("BadSamples", node=plain, again=failures.read_bad_samples)


def test_a_flipped_byte(watch: Watch, nodes: dict[str, Daemon]) -> None:
    plain, body = nodes["plain"], bytes(range(256)) * 400
    client = plain.client()
    client.create_bucket(Bucket="rotten")
    client.put_object(Bucket="rotten", Key="k", Body=body)
    (file,) = (path for path in plain.data_dir.rglob("*.tar") if body in path.read_bytes())
    with file.open("r+b") as data:
        data.seek(file.read_bytes().find(body) + 1000)
        data.write(b"\0")

    def read() -> None:
        with pytest.raises(ClientError):
            client.get_object(Bucket="rotten", Key="k")["Body"].read()

    watch.expect("CorruptData", "DamagedData", "Errors", node=plain, again=read)


def test_a_worker_that_dies_again_and_again(watch: Watch, nodes: dict[str, Daemon]) -> None:
    plain = nodes["plain"]
    for _ in range(6):
        died = plain.signal_child("worker-0", signal.SIGKILL)
        await_true(partial(_has_another, plain, died))
    watch.expect("ProcessesRestart", node=plain)


def _has_another(node: Daemon, died: int) -> bool:
    return node.children().get("worker-0", died) != died


def test_more_clients_than_there_is_room_for(watch: Watch, nodes: dict[str, Daemon]) -> None:
    crowded = nodes["crowded"]
    crowded.client().create_bucket(Bucket="crowd")
    with closing(Wire(crowded.endpoint, crowded.access_key, crowded.secret_key)) as wire:
        crowd(wire, "crowd")
    watch.expect("ClientsRefused", node=crowded)


def test_a_disk_and_then_nodes_and_then_the_control_store_are_lost(
    watch: Watch, cluster: DaemonCluster
) -> None:
    disk = cluster.place / "disks" / "two"
    cluster.kill("n1")
    shutil.rmtree(disk)
    disk.symlink_to(disk.name)  # whoever looks gets an error, root too
    (cluster["n1"].data_dir / "cache" / "boot").write_text("another")
    cluster.up("n1")
    watch.expect("DiskLost", node=cluster["n1"])
    cluster.kill("n3")
    watch.expect("NodeDown", node=cluster["n3"])
    watch.expect("NodeAway", "CopiesMissing")
    cluster.kill("n2")
    watch.expect("DataUnavailable")
    for number in range(len(cluster.etcd.members)):
        cluster.etcd.kill_member(number)
    watch.expect("ControlStoreLost", node=cluster["n1"])
