"""The laws of a loader on a mesh of three, one of which dies in the middle of an epoch and comes back."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pytest
from PIL import Image

import meshsdk
from meshsdk import ops
from meshsdk.testing.loader_suite import LoaderSuite
from tests.support.daemon_cluster import DaemonCluster
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from meshsdk.client.s3_client import Client

require_etcd()
COUNT = 90


def connect(mesh: DaemonCluster) -> Client:
    endpoints = ",".join(mesh.endpoints.values())
    return meshsdk.connect(endpoints, access_key=mesh.access_key, secret_key=mesh.secret_key, deadline=60.0)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DaemonCluster]:
    with DaemonCluster.start(3, args=("--frame-cache", "1MiB")) as three:
        with connect(three) as client:
            client.create_bucket("photos")
            for number in range(COUNT):
                noise, out = np.random.default_rng(number), io.BytesIO()
                Image.fromarray(noise.integers(0, 256, (12, 10, 3), np.uint8)).save(out, "PNG")
                client.put("photos", f"{('cats', 'dogs')[number % 3 == 0]}/{number:03}.png", out.getvalue())
        yield three


@pytest.mark.usefixtures("with_mesh")
class TestMesh(LoaderSuite):
    ranks: ClassVar[Sequence[int]] = (3,)
    mesh: DaemonCluster
    client: Client

    @pytest.fixture
    def with_mesh(self, mesh: DaemonCluster) -> Iterator[None]:
        self.mesh = mesh
        with connect(mesh) as self.client:
            yield

    def events(self) -> Mapping[int, Callable[[], object]]:
        def back() -> None:
            self.mesh.await_state("n2", "away")
            self.mesh.up("n2")

        return {2: lambda: self.mesh.kill("n2"), 4: back}

    def loader(self, batch: int, rank: int = 0, world: int = 1, share: str | None = None) -> meshsdk.Loader:
        parts = [
            meshsdk.open(f"s3://photos/{folder}", fields={"image": "png"}, client=self.client)
            for folder in ("cats", "dogs")
        ]
        ds = meshsdk.mix(*parts, weights=[1, 1], positions=92, block=24)
        ds = ds.map(ops.decode("image"), ops.random_resized_crop("image", 32))
        return meshsdk.Loader(
            ds, batch, seed=3, rank=rank, world=world, share=share, output="numpy", prefetch_bytes=200_000
        )
