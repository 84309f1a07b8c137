"""Large GETs that are not in the page cache: the seeks that they cost a rotational disk."""

from __future__ import annotations

import contextlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.daemons import Daemon
from tests.support.rotational_disk import MIB, rotational_disk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.rotational_disk import ReadLog, RotationalDisk

OBJECTS, SIZE, PART, TURN = 6, 24 * MIB, 8 * MIB, 8 * MIB
OWN_SEEKS = 8
"""Of a node: inodes, maps of extents, its own small files."""


def body(number: int) -> bytes:
    return random.Random(number).randbytes(MIB) * (SIZE // MIB)


class Node:
    """A daemon whose data files are on the disk, with large objects that each lie in one piece."""

    def __init__(self, folder: Path, disk: RotationalDisk, *, tls: bool) -> None:
        self.disk = disk
        where = ("--disk", str(disk.path / f"data-{tls}"), "--index-dir", str(folder / "index"))
        self.daemon = Daemon.start(folder / "data", args=where, tls=tls)
        with contextlib.closing(self.daemon.client()) as client:
            client.create_bucket(Bucket="large")
            for number in range(OBJECTS):
                client.put_object(Bucket="large", Key=str(number), Body=body(number))

    def read(self, asked: list[tuple[int, int, int]]) -> ReadLog:
        """GET (object, offset, length) of each at the same time, cold; the bytes are compared."""
        self.disk.drop_caches()
        with ThreadPoolExecutor(len(asked)) as pool:
            assert all(pool.map(self._is_right, asked))
        return self.disk.stats()

    def _is_right(self, asked: tuple[int, int, int]) -> bool:
        number, offset, length = asked
        span: dict[str, Any] = {} if length == SIZE else {"Range": f"bytes={offset}-{offset + length - 1}"}
        with contextlib.closing(self.daemon.client()) as client:
            received: bytes = client.get_object(Bucket="large", Key=str(number), **span)["Body"].read()
        return received == body(number)[offset : offset + length]


@pytest.fixture(scope="module", params=[False, True], ids=["http", "https"])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("node")
    with rotational_disk(folder / "drive") as disk:
        made = Node(folder, disk, tls=request.param)
        with contextlib.closing(made.daemon):
            yield made


def test_one_get_is_read_from_beginning_to_end(node: Node) -> None:
    seen = node.read([(0, 0, SIZE)])
    assert SIZE <= seen.bytes <= SIZE + MIB
    assert seen.seeks <= OWN_SEEKS, seen.requests


def test_gets_at_once_take_turns_of_several_mib(node: Node) -> None:
    asked = OBJECTS * SIZE
    seen = node.read([(number, 0, SIZE) for number in range(OBJECTS)])
    assert asked <= seen.bytes <= asked + OBJECTS * MIB
    # A short first turn, so that no first byte is late, then long ones.
    assert seen.seeks <= OBJECTS * (SIZE // TURN + 2) + OWN_SEEKS, seen.requests
    assert seen.seek_s < seen.media_s / 2


def test_ranges_of_one_object_at_once_are_read_in_a_row(node: Node) -> None:
    """As boto3 and the SDK download it."""
    seen = node.read([(0, offset, PART) for offset in range(0, SIZE, PART)])
    assert SIZE <= seen.bytes <= SIZE + MIB
    assert seen.seeks <= 2 * SIZE // PART + OWN_SEEKS, seen.requests


def test_a_range_reads_nothing_after_it(node: Node) -> None:
    seen = node.read([(0, 2 * MIB + 1, 3 * MIB)])
    assert seen.bytes <= 3 * MIB + MIB, seen.requests


def test_a_client_that_stops_receiving_has_one_turn_read(node: Node) -> None:
    node.disk.drop_caches()
    with contextlib.closing(node.daemon.client()) as client:
        received = client.get_object(Bucket="large", Key="1")["Body"]
        received.read(MIB)
        read = -1
        for _ in range(100):  # until nothing more is read
            before, read = read, node.disk.stats().bytes
            if read == before:
                break
            threading.Event().wait(0.2)
        received.close()
    assert read <= 2 * TURN + MIB, node.disk.stats().requests
