"""An SDK that meets nodes of another release: what one of them does not know is said with both releases."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

import meshsdk as mesh
from meshsdk import ops
from meshsdk.client import native_api
from meshsdk.client.request import Request, json_request
from meshsdk.client.routing import ClusterDirectory
from meshsdk.client.settings import parse_endpoint
from meshsdk.errors import ConfigurationError, InvalidPlanError, MeshError, NotFoundError
from meshwire.dataset import snapshot
from meshwire.frame import tensor_frame
from meshwire.http_values import mesh_headers
from meshwire.plan import loader_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemons import Daemon

BUCKET = "releases"
FRAME = "batch=4&format=tensors&origin=0&rank=0&world=1"


@pytest.fixture(scope="module", name="client")
def opened(daemon: Daemon) -> Iterator[mesh.Client]:
    with mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client:
        client.create_bucket(BUCKET)
        for number in range(10):
            client.put(BUCKET, f"{number}.bin", bytes([number] * 4))
        yield client


@pytest.fixture(scope="module", name="ds")
def pinned(client: mesh.Client) -> mesh.Dataset:
    found = mesh.open(f"s3://{BUCKET}/", fields={"x": "bin"}, client=client)
    return found.map(ops.frombuffer("x", "uint8", shape=[4]))


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> str:
    """This SDK is of another release than the nodes, which are processes of their own."""
    monkeypatch.setattr(mesh_headers, "RELEASE", "9.8.7")
    return f"The node is of release {RELEASE}, this SDK of 9.8.7"


RELEASE = mesh_headers.RELEASE


def spec_of(ds: mesh.Dataset, **more: Any) -> dict[str, Any]:
    spec = ds.spec(seed=0, shuffle=True, tail="pad", on_bad="substitute", max_bad=0.01, batch=4, buckets=None)
    return {**spec, **more}


FUTURE = [
    {"version": 2},
    {"curriculum": {"k": 1}},
    {"ops": [{"op": "future_crop", "field": "x"}]},
    {"ops": [{"op": "frombuffer", "field": "x", "args": {"dtype": "uint8", "shape": [4], "stride": 2}}]},
    {"ops": [{"op": "frombuffer", "field": "x", "args": {"dtype": "uint8", "shape": [4]}, "version": "99"}]},
    {"shuffle": {"kind": "tree"}},
]


@pytest.mark.parametrize("change", FUTURE)
def test_a_plan_that_the_node_does_not_know(ds: mesh.Dataset, other: str, change: dict[str, Any]) -> None:
    with pytest.raises(InvalidPlanError) as refused:
        native_api.register_plan(ds.client.transport, ds.snapshot.hash, spec_of(ds, **change), 4)
    assert other in str(refused.value)


def test_requests_that_the_node_does_not_know(ds: mesh.Dataset, other: str) -> None:
    transport = ds.client.transport
    plan = native_api.register_plan(transport, ds.snapshot.hash, spec_of(ds), 4)
    asked = Request("GET", f"/-/plans/{plan.hash}/0/0", f"{FRAME}&zip=1")
    with pytest.raises(MeshError, match=other):
        transport.text(asked)
    with pytest.raises(NotFoundError, match=other):
        transport.json(json_request("POST", "/-/curricula", {}))
    pin = {"source": f"s3://{BUCKET}/", "kind": "avro"}
    with pytest.raises(InvalidPlanError, match=other):
        transport.json(json_request("POST", "/-/snapshots", pin))


def test_one_release_is_not_spoken_of(ds: mesh.Dataset) -> None:
    with pytest.raises(InvalidPlanError) as refused:
        native_api.register_plan(ds.client.transport, ds.snapshot.hash, spec_of(ds, curriculum=1), 4)
    assert "release" not in str(refused.value)


def test_frames_of_another_version_are_not_read_and_not_asked_for_again(
    ds: mesh.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_frame, "FRAME_VERSION", "0")
    with mesh.Loader(ds, 4, seed=11) as loader:
        with pytest.raises(
            MeshError, match=rf"version 1, but this SDK \(release {RELEASE}\) reads version 0: upgrade"
        ):
            next(iter(loader))
        with pytest.raises(MeshError, match="reads version 0: upgrade"):
            loader.at(0)
        assert loader.stats().retries == 0


def test_documents_and_states_of_another_version(ds: mesh.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    with mesh.Loader(ds, 4) as loader:
        state = loader.state_dict()
        with pytest.raises(
            ConfigurationError, match=r"2 is newer than this SDK supports \(1\); upgrade shardmesh"
        ):
            loader.load_state_dict({**state, "version": loader_state.STATE_VERSION + 1})
    monkeypatch.setattr(snapshot, "_VERSION", 9)
    with pytest.raises(MeshError, match=r"another release wrote it.*upgrade the older of SDK and server"):
        native_api.fetch_snapshot(ds.client.transport, ds.snapshot.hash)


def test_a_map_that_is_not_understood_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    both = tuple(parse_endpoint(f"http://127.0.0.1:{port}") for port in (1, 2))
    later = b'{"map": {"version": 3, "slots": 16, "copies": 1, "nodes": [], "continents": 2}}'
    directory = ClusterDirectory(both, lambda _: later)
    caplog.set_level(logging.DEBUG, "meshsdk")
    assert directory.current() is None
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "continents: unknown field" in warnings[0]
    assert "upgrade shardmesh on this machine" in warnings[0]
