"""Hostile archives against a real daemon: refused, within bounds, and others are served meanwhile."""

from __future__ import annotations

import gzip
import random
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from botocore.exceptions import ClientError

from tests.support.archive_files import archive_of, tar_of, zstd
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOM = 64 << 20
HONEST = {"a": b"x" * 1000}


@pytest.fixture(scope="module")
def small() -> Iterator[Daemon]:
    """One whose copies may have 32 MiB."""
    with Daemon.start(args=("--view-cache", str(ROOM))) as running:
        client = running.client()
        client.create_bucket(Bucket="box")
        client.close()
        yield running


def _zeros(count: int, piece: int = 1 << 20) -> Iterator[bytes]:
    for _ in range(count):
        yield bytes(piece)


def zstd_bomb(megabytes: int) -> bytes:
    made = zstd.ZstdCompressor()
    return b"".join(made.compress(piece) for piece in _zeros(megabytes)) + made.flush()


def tar_head(size: int) -> bytes:
    """A member that says it has `size` bytes."""
    head = bytearray(tar_of({"zeros": b""})[:512])
    head[124:136] = b"%011o\0" % size
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head)


def bombs() -> dict[str, bytes]:
    many = zstd_bomb(4 << 10)  # 4 GiB of zeros
    inside = zstd.compress(tar_head(4 << 30))
    return {
        "zeros.tar.zst": many,
        "member.tar.zst": inside + many,
        "zeros.tgz": gzip.compress(bytes(100 << 20), 9) * 40,
        "wide.tar.zst": b"\x28\xb5\x2f\xfd\x00\xa8" + bytes(64),  # a window of 2 GiB
        "zeros.zip": archive_of("zip", {f"{n}": bytes(60 << 20) for n in range(4)}),
    }


def test_bombs_cost_neither_memory_nor_disk_and_others_go_on(small: Daemon) -> None:
    s3 = small.client()
    s3.put_object(Bucket="box", Key="honest.tgz", Body=archive_of("tgz", HONEST))
    made = bombs()
    assert sum(map(len, made.values())) < 16 << 20
    worker = psutil.Process(small.children()["worker-0"])
    used = _disk(small)
    before, peak = worker.memory_info().rss, 0
    # What was served while a bomb was looked at, by the number of the bomb; 0: none is looked at.
    stop, served, handled = threading.Event(), Counter[int](), [0]

    def honest() -> None:
        client = small.client()
        while not stop.wait(0.005):
            bomb = handled[0]
            got = client.get_object(Bucket="box", Key="honest.tgz/-/a")["Body"].read()
            assert got == HONEST["a"]
            if bomb and handled[0] == bomb:
                served[bomb] += 1
        client.close()

    other = threading.Thread(target=honest)
    other.start()
    try:
        # If others waited for a bomb, one of them at most could be answered before it ends. How many are
        # answered depends on how soon the bomb is refused: more bombs follow where that is soon.
        for attempt in range(20):
            for number, (name, data) in enumerate(made.items(), attempt * len(made) + 1):
                key = f"{attempt}-{name}"
                s3.put_object(Bucket="box", Key=key, Body=data)
                handled[0] = number
                with pytest.raises(ClientError, match=rf"box/{key} cannot be read as an archive"):
                    s3.get_object(Bucket="box", Key=f"{key}/-/zeros")
                handled[0] = 0
                peak = max(peak, worker.memory_info().rss)
            if max(served.values(), default=0) >= 3:
                break
    finally:
        stop.set()
        other.join(60)
    assert peak - before < 200 << 20
    assert max(served.values(), default=0) >= 3, served
    deadline = time.monotonic() + 60
    while _disk(small) - used > ROOM + (32 << 20):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    s3.close()


def _disk(daemon: Daemon) -> int:
    return sum(path.stat().st_size for path in (daemon.data_dir / "extents").rglob("*") if path.is_file())


def test_an_archive_too_large_for_a_copy_says_what_to_do(small: Daemon) -> None:
    s3: Any = small.client()
    source = random.Random(2)
    data = {f"{number}.bin": source.randbytes(1 << 20) for number in range(40)}
    s3.put_object(Bucket="box", Key="large.tar.zst", Body=archive_of("tar.zst", data))
    with pytest.raises(ClientError, match="raise --view-cache"):
        s3.get_object(Bucket="box", Key="large.tar.zst/-/1.bin")
    listed = s3.list_objects_v2(Bucket="box", Prefix="large.tar.zst/-/")["Contents"]
    assert sum(entry["Size"] for entry in listed) == 40 << 20
    s3.close()


def test_a_small_archive_takes_little_of_the_room_that_all_share() -> None:
    """2 MiB that hold 2 GiB, with the room for copies that a node has unless it is told otherwise."""
    packed = gzip.compress(tar_head(2 << 30), 9) + gzip.compress(bytes(128 << 20), 9) * 16
    assert len(packed) < 3 << 20
    with Daemon.start() as daemon:
        s3 = daemon.client()
        s3.create_bucket(Bucket="box")
        s3.put_object(Bucket="box", Key="zeros.tgz", Body=packed)
        used, most = _disk(daemon), 50 * len(packed)
        for _ in range(2):  # the second time from what is written down
            answer = daemon.request("GET", "/box/zeros.tgz?members")
            assert answer.status == 422, answer.body
            assert f"more than {most} bytes".encode() in answer.body
            assert b"--archive-ratio" in answer.body
        assert _disk(daemon) - used < 2 * most  # twice: by who asked, and when it came in
        s3.close()
    with Daemon.start(args=("--archive-ratio", "2000")) as daemon:
        s3 = daemon.client()
        s3.create_bucket(Bucket="box")
        small = archive_of("tgz", {"zeros": bytes(100 << 20)})
        s3.put_object(Bucket="box", Key="zeros.tgz", Body=small)
        assert daemon.request("GET", "/box/zeros.tgz?members").status == 200
        s3.close()
