"""Overlapping writes and refusals on a mesh of daemons of which one cannot take what it must have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.reproductions import BUCKET, KINDS, PRIMARY, Scene
from tests.support.required import require_etcd
from tests.support.s3_raw import Wire, read_answer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.faults.reproductions import Kind

require_etcd()


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with Scene() as found:
        yield found


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_answered_before_the_other_owner_has_it(scene: Scene, kind: Kind) -> None:
    for _ in range(2):
        counts = scene.run(kind)
        assert counts["attempted"] > 0
        assert (counts["early"], counts["lost"]) == (0, 0), counts


@pytest.mark.parametrize("expect", [{}, {"expect": "100-continue"}])
def test_a_refusal_comes_before_the_body(scene: Scene, expect: dict[str, str]) -> None:
    key, node = scene.new_key(), scene.mesh.await_healthy()[PRIMARY]
    node.client().put_object(Bucket=BUCKET, Key=key, Body=b"first")
    wire = Wire(node.endpoint, node.access_key, node.secret_key)
    sock = wire.connect()
    headers = {"content-length": str(1 << 30), "if-none-match": "*", **expect}
    sock.sendall(wire.head("PUT", f"/{BUCKET}/{key}", headers=headers))
    assert read_answer(sock, "PUT").status == 412
    wire.close()
