"""Pages of a snapshot that are lost under a running node: they are made again, and the loader goes on."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from itertools import islice
from typing import TYPE_CHECKING

import pytest

import meshsdk as mesh
from meshsdk.errors import NotFoundError
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

FILES, LINES, BATCH = 8, 9000, 16


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon.start() as started:
        with contextlib.closing(started.client()) as s3:
            s3.create_bucket(Bucket="lines")
            for number in range(FILES):
                rows = (b'"%07d"\n' % (number * LINES + row) for row in range(LINES))
                s3.put_object(Bucket="lines", Key=f"{number}.jsonl", Body=b"".join(rows))
        yield started


@pytest.fixture
def client(daemon: Daemon) -> Iterator[mesh.Client]:
    with mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as made:
        yield made


def batches(client: mesh.Client) -> Iterator[mesh.Batch]:
    dataset = mesh.open("s3://lines/", {"text": "jsonl"}, kind="lines", client=client)
    loader = mesh.Loader(
        dataset, BATCH, rank=0, world=1, output="numpy", prefetch_bytes=1 << 12, on_bad="raise"
    )
    return iter(loader)


def texts(batches: Iterable[mesh.Batch]) -> set[bytes]:
    """All samples of these batches, each of which is a whole line."""
    found = [bytes(text) for batch in batches for text in batch["text"]]
    assert {len(text) for text in found} == {9}
    assert len(set(found)) == len(found)
    return set(found)


def places_of_pages(daemon: Daemon) -> tuple[Path, list[int]]:
    """The data file that has all pages, and where in it each begins, the last ones last."""
    for path in (daemon.data_dir / "extents").rglob("*.tar"):
        places = [found.start() for found in re.finditer(b"shardmesh.lines", path.read_bytes())]
        if len(places) >= FILES:
            return path, places
    raise AssertionError("no data file has the pages")


@pytest.mark.timeout(240)
def test_a_loader_goes_on_when_pages_have_become_zeros(daemon: Daemon, client: mesh.Client) -> None:
    """As if their file was cut off and has grown again."""
    loaded = batches(client)
    found = texts(islice(loaded, 3))
    path, places = places_of_pages(daemon)
    with path.open("r+b") as file:
        for start, end in itertools.pairwise(places[:FILES]):
            file.seek(start)
            file.write(bytes(end - start - 1024))
    more = texts(islice(loaded, 100))
    assert len(found | more) == 103 * BATCH
    assert "is made again" in daemon.stderr_path.read_text()


@pytest.mark.timeout(240)
def test_pages_that_cannot_be_read_are_no_damage_of_the_index(daemon: Daemon, client: mesh.Client) -> None:
    """Their file is cut off, so that each look at them ends the process by SIGBUS, as on a device that gives
    EIO. The plan is lost, too, and the error says what to do."""
    for _ in range(3):
        loaded = batches(client)
        texts(islice(loaded, 3))
        path, places = places_of_pages(daemon)
        os.truncate(path, places[-FILES])
        with pytest.raises(NotFoundError, match=r"the (plan|snapshot) \w+ is damaged .* as before"):
            texts(islice(loaded, 100))
    assert len(texts(islice(batches(client), 100))) == 100 * BATCH
    log = daemon.stderr_path.read_text()
    assert log.count("killed by SIGBUS (a memory-mapped page of a snapshot could not be read") >= 3
    assert daemon.running
