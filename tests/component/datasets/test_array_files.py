"""npy, npz and safetensors as sources, as objects and in shards: schema, samples, and files that lie."""

from __future__ import annotations

import io
import tarfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save

import meshsdk as mesh
from meshsdk import ops
from meshsdk.errors import BadSampleError, InvalidPlanError, PreflightError
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from meshsdk.client.s3_client import Client

COUNT = 12


def array(number: int) -> Any:
    return np.arange(6, dtype=np.float32).reshape(2, 3) + number


def npy(value: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, value)
    return out.getvalue()


def npz(value: Any) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, x=value, other=np.zeros(3))
    return out.getvalue()


FORMS: dict[str, tuple[Callable[[Any], bytes], Any]] = {
    "npy": (npy, ops.npy("x")),
    "npz": (npz, ops.npz("x", "x")),
    "safetensors": (lambda value: save({"x": value, "other": np.zeros(3)}), ops.safetensors("x", "x")),
}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        Daemon.start(args=("--transform-workers", "2")) as daemon,
        mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client,
    ):
        client.create_bucket("arrays")
        for form, (write, _) in FORMS.items():
            shard = io.BytesIO()
            with tarfile.open(fileobj=shard, mode="w") as tar:
                for number in range(COUNT):
                    data = write(array(number))
                    client.put("arrays", f"{form}/{number:03}.{form}", data)
                    member = tarfile.TarInfo(f"{number:03}.{form}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
            client.put("arrays", f"shards-{form}/000.tar", shard.getvalue())
        yield client


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("folder", ["", "shards-"])
def test_arrays_of_files_are_samples(client: Client, form: str, folder: str) -> None:
    ds = mesh.open(f"s3://arrays/{folder}{form}", fields={"x": form}, client=client).map(FORMS[form][1])
    assert len(ds) == COUNT
    assert str(ds.schema()["x"]).startswith("float32")
    assert np.array_equal(np.asarray(ds[3]["x"]).reshape(2, 3), array(3))
    assert ds.stats().sizes["x"].median > 24
    assert ds.preflight(global_batch=4).row_bytes >= 24
    dense = mesh.open(f"s3://arrays/{folder}{form}", fields={"x": form}, client=client)
    named = () if form == "npy" else ("x",)
    dense = dense.map(getattr(ops, form)("x", *named, dtype="float32", shape=[2, 3]))
    seen = []
    with mesh.Loader(dense, 4, seed=1, output="numpy") as loader:
        for batch in loader:
            assert batch["x"].shape == (4, 2, 3)
            seen += [int(value) for value in batch["x"][:, 0, 0]]
    assert sorted(seen) == list(range(COUNT))


def test_files_that_lie_are_bad_samples(client: Client) -> None:
    for form, (write, op) in FORMS.items():
        place = f"bad-{form}"
        client.put("arrays", f"{place}/a.{form}", write(array(0)))
        client.put("arrays", f"{place}/b.{form}", write(array(1))[:-30])
        ds = mesh.open(f"s3://arrays/{place}", fields={"x": form}, client=client).map(op)
        assert np.array_equal(np.asarray(ds[0]["x"]).reshape(2, 3), array(0))
        with pytest.raises(BadSampleError, match=f"{place}/b"):
            ds[1]
        assert any("bad" in note for note in ds.preflight().notes)
    client.put("arrays", "objects/a.npy", npy(np.array([{"a": 1}], dtype=object)))
    ds = mesh.open("s3://arrays/objects", fields={"x": "npy"}, client=client)
    ds = ds.map(ops.npy("x", dtype="float32"))
    with pytest.raises(PreflightError, match=r"dtype object.* write numbers"):
        ds.preflight()


@pytest.mark.parametrize("form", ["npy", "npz"])
def test_arrays_of_python_objects_are_told_what_to_write_instead(client: Client, form: str) -> None:
    """Their dtype is looked up, as none is given."""
    made = io.BytesIO()
    held = np.array([{"a": 1}], dtype=object)
    if form == "npy":
        np.save(made, held, allow_pickle=True)
    else:
        np.savez(made, x=held)
    client.put("arrays", f"pickled-{form}/a.{form}", made.getvalue())
    ds = mesh.open(f"s3://arrays/pickled-{form}", fields={"x": form}, client=client).map(FORMS[form][1])
    with pytest.raises(InvalidPlanError, match=r"dtype object\) is a pickle.* write numbers"):
        ds.preflight()
