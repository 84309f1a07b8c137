"""What orders cost a node with rotational disks, over HTTP, through the SDK and the command."""

from __future__ import annotations

import io
import json
import tarfile
from typing import TYPE_CHECKING, Any, Literal

import pytest

import meshsdk as mesh
from bench.page_cache import drop_pages
from meshsdk.admin.cluster_admin import scrape
from meshsdk.cli import run
from meshsdk.client.settings import parse_endpoint
from tests.support.daemons import Daemon
from tests.support.origin_fixtures import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.client.s3_client import Client

SAMPLES, SIZE, SHARD = 480, 300_000, 40


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    args = ("--disk-type", "rotational", "--read-ahead", "64MiB")
    with Daemon.start(args=args) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[Client]:
    with mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client:
        client.create_bucket("tars")
        for first in range(0, SAMPLES, SHARD):
            client.put("tars", f"{first:05d}.tar", archive_of(range(first, first + SHARD), "w"))
        client.create_bucket("compressed")
        client.put("compressed", "00000.tar.gz", archive_of(range(SHARD), "w:gz"))
        yield client


def archive_of(numbers: range, mode: Literal["w", "w:gz"]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for number in numbers:
            member = tarfile.TarInfo(f"{number:05d}.bin")
            member.size = SIZE
            archive.addfile(member, io.BytesIO(number.to_bytes(4, "big") * (SIZE // 4)))
    return file.getvalue()


def asked(daemon: Daemon, snapshot: str, shuffles: list[dict[str, Any]], code: int = 200) -> dict[str, Any]:
    body = json.dumps({"shuffles": shuffles}).encode()
    answer = daemon.request("POST", f"/-/snapshots/{snapshot}/read-cost", body)
    assert answer.status == code, answer.body
    found: dict[str, Any] = json.loads(answer.body)
    return found


def tars(client: Client) -> mesh.Dataset:
    return mesh.open("s3://tars/", fields={"data": "bin"}, client=client)


def test_orders_of_tars_cost_what_their_windows_do(daemon: Daemon, client: Client) -> None:
    snapshot = tars(client).snapshot.hash
    answer = asked(daemon, snapshot, [{"kind": "global"}, {"kind": "blocks", "shards": 2}, {"kind": "none"}])
    full, blocks, stored = answer["orders"]
    assert answer["rotational"]
    for order in answer["orders"]:
        assert (order["samples"], order["bytes"], order["estimated"]) == (SAMPLES, SAMPLES * SIZE, False)
        assert order["without_read_ahead"]["seeks"] == SAMPLES
    # Windows of 32 MiB: a shuffle over 144 MB leaves gaps, blocks of 24 MB none.
    assert full["seeks_per_sample"] > 0.1 > 10 * blocks["seeks_per_sample"] / 4
    assert blocks["seeks"] <= 2 * SAMPLES // SHARD
    assert stored["seeks"] <= 2 * SAMPLES // SHARD
    assert blocks["read_bytes"] < 1.1 * blocks["bytes"]
    assert full["randomness"]["shard_runs"] < blocks["randomness"]["shard_runs"] < SHARD / 2


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_an_epoch_costs_what_was_estimated(daemon: Daemon, client: Client, shards: int) -> None:
    ds = tars(client)
    [order] = asked(daemon, ds.snapshot.hash, [{"kind": "blocks", "shards": shards}])["orders"]
    drop_pages(daemon.data_dir)
    before = counted(daemon)
    loader = mesh.Loader(ds, 16, seed=shards, shuffle=mesh.Blocks(shards=shards), output="numpy")
    with loader:
        assert sum(batch.rows for batch in loader) == SAMPLES
    seeks, read = (after - one for after, one in zip(counted(daemon), before, strict=True))
    name = loader.plan.hash[:12]
    eventually(lambda: name in plans_of(daemon), 10)  # an answer serves for a second
    plan = plans_of(daemon)[name]
    assert (plan["seeks"], plan["rows"]) == (seeks, SAMPLES)
    assert plan["reading"] > 0 < plan["cpu"]
    if shards < 3:
        assert seeks == pytest.approx(order["seeks"], rel=0.25)
        assert read == pytest.approx(order["read_bytes"], rel=0.05)
    else:  # a block is larger than a window, and the first window of each reads some bytes of the second
        assert 0 < seeks <= order["seeks"]
        assert SAMPLES * SIZE <= read <= order["read_bytes"]


def plans_of(daemon: Daemon) -> dict[str, dict[str, float]]:
    nodes = json.loads(daemon.request("GET", "/-/activity").body)["nodes"]
    plans: dict[str, dict[str, float]] = nodes.popitem()[1]["plans"]
    return plans


def counted(daemon: Daemon) -> tuple[float, float]:
    """The seeks of reads ahead so far, and the bytes read."""
    told = scrape(parse_endpoint(daemon.endpoint))
    assert "meshd_read_ahead_seeks_total" in told.values
    return (
        told.sum_of("meshd_read_ahead_seeks_total"),
        told.sum_of("meshd_read_ahead_bytes_total", result="read"),
    )


def test_a_compressed_archive_costs_what_its_decompressed_copy_does(daemon: Daemon, client: Client) -> None:
    ds = mesh.open("s3://compressed/", fields={"data": "bin"}, client=client)
    [order] = asked(daemon, ds.snapshot.hash, [{"kind": "none"}])["orders"]
    assert (order["samples"], order["bytes"]) == (SHARD, SHARD * SIZE)


def test_preflight_shows_the_costs(client: Client) -> None:
    found = tars(client).preflight(64)
    assert found.disk_cost is not None
    full, blocks, stored = found.disk_cost.orders
    assert (full.shuffle, blocks.shuffle, stored.shuffle) == ("True", "Blocks(shards=2)", "False")
    assert blocks.seeks < full.seeks
    assert str(found).endswith(str(found.disk_cost))
    assert found.disk_cost.advice in str(found)


def test_a_mix_has_an_order_of_its_own_and_is_not_estimated(client: Client) -> None:
    whole = tars(client)
    mixed = mesh.mix(whole, whole.filter("name < '00100'"), weights=[3, 1])
    assert mixed.preflight().disk_cost is None


def test_the_command_prints_and_exports_them(
    daemon: Daemon, client: Client, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MESH_ENDPOINT", daemon.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", daemon.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", daemon.secret_key)
    assert run(["preflight", "s3://tars/", "--field", "data=bin"]) == 0
    assert "rotational disks of " in capfd.readouterr().out
    assert run(["preflight", "--json", "s3://tars/", "--field", "data=bin"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["disk_cost"]["orders"][0]["shuffle"] == "True"


def test_wrong_requests(daemon: Daemon, client: Client) -> None:
    snapshot = tars(client).snapshot.hash
    assert asked(daemon, snapshot, [], 400)["error"]["detail"] == {"path": "shuffles"}
    assert asked(daemon, "0" * 64, [{"kind": "none"}], 404)["error"]["code"] == "NoSuchSnapshot"
    answer = daemon.request("POST", f"/-/snapshots/{snapshot}/read-costs", b"{}")
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (404, "NoSuchKey")


def test_an_estimate_reads_the_index_alone(daemon: Daemon, client: Client) -> None:
    snapshot = tars(client).snapshot.hash
    drop_pages(daemon.data_dir)
    before = counted(daemon)
    asked(daemon, snapshot, [{"kind": "global"}])
    assert counted(daemon) == before
