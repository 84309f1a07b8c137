"""Frames as shared memory for jobs on the node's host: the same batches, one memory for all, nothing left,
and TCP wherever it does not work."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import io
import mmap
import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image

import meshsdk as mesh
from meshd.core.memory_frames import MemoryAccount, MemoryFrame, is_sealed, make_block
from meshd.server.local_handover import LocalFrameService
from meshsdk import ops
from meshsdk.client import local_handover as neighbours_module
from meshsdk.client.arena import Arena
from meshsdk.client.local_handover import HandoverError, LocalHandover
from meshsdk.client.settings import Endpoint
from meshsdk.errors import ConfigurationError
from meshwire.frame import tensor_frame
from meshwire.http_values.mesh_headers import (
    HANDOVER_TICKET_HEADER,
    LOCAL_HANDOVER_HEADER,
    parse_handover_directory,
    parse_handover_ticket,
)
from meshwire.s3.request_head import RequestHead
from meshwire.sigv4 import Credential, sign
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCH, SIDE, PICTURES = 8, 128, 32
SLACK = 1 << 16  # labels, headers
HERE = Endpoint("http", "127.0.0.1", 9000)


@pytest.fixture(scope="module")
def pair() -> Iterator[Daemon]:
    """Two workers, so that a frame may be offered by another than the one that told where."""
    with Daemon.start(workers=2, args=("--transform-workers", "1")) as daemon:
        with contextlib.closing(daemon.client()) as client:
            client.create_bucket(Bucket="photos")
            for number in range(PICTURES):
                pixels = np.random.default_rng(number).integers(0, 256, (20, 24, 3), np.uint8)
                file = io.BytesIO()
                Image.fromarray(pixels).save(file, "PNG")
                client.put_object(Bucket="photos", Key=f"train/{number:04}.png", Body=file.getvalue())
        yield daemon


def loader(daemon: Daemon, **options: Any) -> mesh.Loader:
    client = mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key)
    pinned = mesh.open("s3://photos/train/", fields={"image": "png"}, client=client)
    mapped = pinned.map(ops.decode("image"), ops.resize("image", [SIDE, SIDE]))
    return mesh.Loader(mapped, BATCH, output="numpy", **{"seed": 3, **options})


def taken(one: mesh.Loader) -> list[np.ndarray]:
    return [batch["image"].copy() for batch in one]


@pytest.mark.parametrize(
    ("verify", "here", "sent"), [(True, 0, 4), ("all", 4, 4), (False, 0, 0)], ids=("sent", "all", "none")
)
def test_checksums_are_of_what_was_sent_unless_all_are_wanted(
    pair: Daemon, monkeypatch: pytest.MonkeyPatch, verify: Any, here: int, sent: int
) -> None:
    looked, real = [], tensor_frame.verify_frame

    def verified(*args: Any) -> None:
        looked.append(args)
        real(*args)

    monkeypatch.setattr(tensor_frame, "verify_frame", verified)
    with loader(pair, verify=verify) as near:
        assert len(taken(near)) == PICTURES // BATCH == near.stats().local
    assert len(looked) == here
    monkeypatch.setenv("MESH_LOCAL", "off")
    with loader(pair, verify=verify) as far:
        assert len(taken(far)) == PICTURES // BATCH
        assert far.stats().local == 0
    assert len(looked) == here + sent


def test_a_word_that_means_no_checking_is_refused(pair: Daemon) -> None:
    with pytest.raises(
        ConfigurationError, match=r"verify='off': use True \(frames from the network\), 'all'"
    ):
        loader(pair, verify="off")


def ask(
    daemon: Daemon, target: str, said: str = "", *, signed: bool = True
) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of a GET that says where it comes from."""
    path, _, query = target.partition("?")
    headers = {"host": urlsplit(daemon.endpoint).netloc}
    if signed:
        credential = Credential(daemon.access_key, daemon.secret_key)
        headers |= sign(
            RequestHead("GET", path, query, headers),
            credential,
            region="us-east-1",
            timestamp=int(time.time()),
            payload_hash=hashlib.sha256(b"").hexdigest(),
        )
    with contextlib.closing(daemon.connect()) as connection:
        connection.request("GET", target, headers=headers | ({LOCAL_HANDOVER_HEADER: said} if said else {}))
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def handed_bytes(daemon: Daemon) -> int:
    _, _, text = ask(daemon, "/metrics", signed=False)
    found = re.findall(rb"^meshd_frames_handed_bytes(?:\{[^}]*\})? ([0-9.e+-]+)$", text, re.M)
    return int(sum(map(float, found)))


def comes_back(daemon: Daemon) -> None:
    """All memory that was handed out is the node's alone again."""
    until = time.monotonic() + 60
    while handed_bytes(daemon):
        assert time.monotonic() < until, f"{handed_bytes(daemon)} bytes are still out"
        threading.Event().wait(0.02)


def descriptors() -> set[tuple[int, int]]:
    """Number and inode of what this process has open."""
    found = set()
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the listing's own, which is closed by now
            found.add((number, os.fstat(number).st_ino))
    return found


def mapped_frames() -> list[int]:
    """Inodes of the frames that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [int(line.split()[4]) for line in lines if "memfd:mesh-frame" in line]


def test_batches_are_those_that_tcp_brings(pair: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    with loader(pair) as near:
        images = taken(near)
        assert near.stats().local == len(images) == PICTURES // BATCH
        assert near.stats().bytes > sum(image.nbytes for image in images)
    monkeypatch.setenv("MESH_LOCAL", "off")
    with loader(pair) as far:
        assert all(np.array_equal(one, other) for one, other in zip(images, taken(far), strict=True))
        assert far.stats().local == 0
    gc.collect()
    comes_back(pair)
    assert descriptors() - before == set()  # what a test before left may have closed meanwhile
    assert mapped_frames() == []


def test_jobs_share_one_memory_and_cannot_change_each_others_batches(pair: Daemon) -> None:
    with loader(pair, share="both") as one, loader(pair, share="both") as other:
        first, second = next(iter(one)), next(iter(other))
        pages = mapped_frames()
        assert len(set(pages)) < len(pages)  # the same frame, mapped twice
        kept = second["image"].copy()
        first["image"][:] = 7
        assert np.array_equal(second["image"], kept)
        assert handed_bytes(pair) > 0
        del first, second
    comes_back(pair)


def test_a_kept_batch_outlives_its_loader_and_then_frees_the_nodes_memory(pair: Daemon) -> None:
    with loader(pair) as one:
        kept = next(iter(one))["image"][:2]
    expected = kept.copy()
    assert handed_bytes(pair) > 0
    assert np.array_equal(kept, expected)
    del kept
    gc.collect()
    comes_back(pair)


def test_back_pressure_counts_frames_that_are_elsewhere(pair: Daemon) -> None:
    frame = BATCH * SIDE * SIDE * 3
    with loader(pair, prefetch_bytes=4 * frame) as one:
        kept = [batch for _ in range(3) for batch in one]
        assert one.stats().local == len(kept)
        assert one.stats().overflows > 0
        assert one._arena.leased >= len(kept) * frame
        assert handed_bytes(pair) <= 4 * frame + SLACK  # what is beyond was copied, and is the job's own
        del kept
        gc.collect()
        assert one._arena.free_bytes() == one._arena.budget


@pytest.mark.parametrize("setting", ["elsewhere", "another id", "no sockets"])
def test_where_it_does_not_work_tcp_does(
    pair: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    if setting != "elsewhere":
        _, headers, _ = ask(pair, f"/-/plans/{'0' * 64}")
        place = parse_handover_directory(headers[LOCAL_HANDOVER_HEADER])
        assert place is not None
        (tmp_path / "id").write_text("0" * 32 if setting == "another id" else place.id)
    monkeypatch.setenv("MESH_LOCAL", str(tmp_path))
    with loader(pair) as far:
        assert len(taken(far)) == PICTURES // BATCH
        assert far.stats().local == 0
        assert (far.stats().retries > 0) == (setting == "no sockets")
    comes_back(pair)


def answered(daemon: Daemon) -> tuple[str, str]:
    """(directory, what an answer handed over), by hand."""
    with loader(daemon) as one:
        digest = one.plan.hash
    place = parse_handover_directory(ask(daemon, f"/-/plans/{digest}")[1][LOCAL_HANDOVER_HEADER])
    assert place is not None
    status, headers, body = ask(daemon, f"/-/plans/{digest}/0/0?batch={BATCH}", place.id)
    assert (status, body) == (200, b"")
    return place.directory, headers[HANDOVER_TICKET_HEADER]


def fetched(directory: str, name: str, ticket: bytes) -> tuple[int | None, socket.socket]:
    line = neighbours_module._dial(directory, name)
    line.sendall(ticket)
    _, fds, _, _ = socket.recv_fds(line, 1, 1)
    return (fds[0] if fds else None), line


def test_a_ticket_is_good_once_and_what_it_brings_can_only_be_read(pair: Daemon) -> None:
    directory, said = answered(pair)
    handed = parse_handover_ticket(said)
    assert handed is not None
    nothing, line = fetched(directory, handed.socket, b"0" * 32)
    assert nothing is None
    line.close()
    fd, line = fetched(directory, handed.socket, handed.ticket.encode())
    assert fd is not None
    assert os.fstat(fd).st_size == handed.size
    for writing in (
        lambda: os.pwrite(fd, b"!", 0),
        lambda: os.ftruncate(fd, 0),
        lambda: mmap.mmap(fd, handed.size, prot=mmap.PROT_WRITE | mmap.PROT_READ),
    ):
        with pytest.raises(PermissionError):
            writing()
    again, other = fetched(directory, handed.socket, handed.ticket.encode())
    assert again is None
    other.close()
    assert handed_bytes(pair) >= handed.size
    line.close()
    os.close(fd)
    comes_back(pair)


def test_the_request_is_judged_as_ever(pair: Daemon) -> None:
    directory, said = answered(pair)
    assert said
    with loader(pair) as one:
        path = f"/-/plans/{one.plan.hash}/0/0?batch={BATCH}"
    own = neighbours_module._read_id(directory)
    assert ask(pair, path, own, signed=False)[0] == 403
    _, headers, body = ask(pair, path, "1" * 32)
    assert HANDOVER_TICKET_HEADER not in headers
    assert len(body) > BATCH * SIDE * SIDE * 3


# --- the desk and the SDK's side, without a daemon -------------------------------------------------------


def finished(size: int = 1 << 20) -> MemoryFrame:
    frame = MemoryFrame(size, MemoryAccount())
    os.pwrite(frame.fd, os.urandom(size), 0)
    return frame


def test_what_is_out_has_a_bound_and_unused_tickets_expire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshd.server.local_handover.TICKET_SECONDS", 0.05)

    async def scenario() -> None:
        desk = LocalFrameService(tmp_path / "local", "w0", 3 << 20)
        serving = asyncio.create_task(desk.serve_forever())
        frames = [finished() for _ in range(4)]
        handles, expired = [frame.hand_out("miss") for frame in frames], asyncio.Event()
        handles[0].done = expired.set
        assert all(is_sealed(handle.fd, handle.size) for handle in handles)
        given = [desk.offer_frames([handle], desk.location.id) for handle in handles]
        assert [handed is not None for handed in given] == [True, True, True, False]
        async with asyncio.timeout(60):
            await expired.wait()  # nobody came
        assert desk.offer_frames([handles[3]], desk.location.id) is not None
        small = finished(1000).hand_out("miss")
        assert desk.offer_frames([small], desk.location.id) is None
        assert desk.offer_frames([small], "") is None
        small.close()
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        assert handles[3].fd < 0

    asyncio.run(scenario())


def test_files_and_memory_that_can_be_written_are_never_handed_out(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        file.truncate(1 << 20)
    with open(tmp_path / "file", "rb") as file:
        assert not is_sealed(file.fileno(), 1 << 20)
    frame = finished()
    assert not is_sealed(frame.fd, frame.size)
    handle = frame.hand_out("miss")
    assert is_sealed(handle.fd, handle.size)
    assert not is_sealed(handle.fd, handle.size - 1)
    handle.close()


class _Pinned:
    """Memory a device copies from: frames must lie in it."""

    def capacity(self, size: int) -> int:
        return size

    def allocate(self, size: int) -> np.ndarray:
        return np.empty(size, np.uint8)


@contextlib.contextmanager
def handover_server(directory: Path, fd: int) -> Iterator[threading.Event]:
    """A node that hands one descriptor over, to the first client that asks at `x.sock`; the event is set when
    the client has finished with it."""
    (directory / "id").write_text("a" * 32)
    ended = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "x.sock"))
        listener.listen()

        def serve() -> None:
            line, _ = listener.accept()
            with line:
                line.recv(32)
                socket.send_fds(line, [b"!"], [fd])
                line.recv(1)
            ended.set()

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        yield ended
        serving.join(60)
        assert ended.is_set()


@pytest.mark.parametrize("sealed", [True, False])
def test_frames_for_a_device_are_read_into_its_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, sealed: bool
) -> None:
    frame = finished()
    content = os.pread(frame.fd, frame.size, 0)
    handle = frame.hand_out("miss") if sealed else None
    near, arena = LocalHandover({}), Arena(4 << 20, _Pinned())
    with handover_server(tmp_path, frame.fd):
        near.record_directory(HERE, f"{'a' * 32} {tmp_path}")
        assert near.handover_id(HERE) == "a" * 32
        answer = f"x.sock {'b' * 32} {frame.size}"
        if sealed:
            (lease,) = near.receive_frames(HERE, answer, (), arena)
            assert bytes(lease.view) == content
            assert arena.allocated > 0
        else:  # it could change under a job that has checked it
            with pytest.raises(HandoverError, match="not sealed"):
                near.receive_frames(HERE, answer, (), arena)
            assert near.handover_id(HERE) == ""
    near.record_directory(
        HERE, f"{'a' * 32} {tmp_path}"
    )  # said again and again, but believed only after a while
    assert (near.handover_id(HERE) == "") == (not sealed)
    monkeypatch.setattr(neighbours_module, "_SHUNNED", 0.0)
    if not sealed:
        near._shun(HERE)
        near.record_directory(HERE, f"{'a' * 32} {tmp_path}")
        assert near.handover_id(HERE) == "a" * 32
    if handle is not None:
        handle.close()


def test_frames_in_a_block_are_handed_out_as_one_file_to_clients_that_accept_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        desk = LocalFrameService(tmp_path / "local", "w0", 8 << 20)
        one, two = (make_block([200_000, 100_000, 150_000], MemoryAccount()) for _ in range(2))
        here, whole = desk.location.id, [frame.hand_out("miss") for frame in one]
        assert desk.offer_frames(whole, here) is None
        mixed = [whole[0], two[1].hand_out("miss")]
        assert desk.offer_frames(mixed, here, blocks=True) is None
        mixed[1].close()
        ticket = desk.offer_frames(whole, here, blocks=True)
        assert ticket is not None
        assert ticket.size == 450_000
        assert len(desk._held[ticket.ticket].frames) == 3
        desk._expire(ticket.ticket)
        assert all(frame.fd < 0 for frame in whole)
        desk._listener.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(("budget", "adopted"), [(64 << 20, True), (1 << 20, False)])
def test_a_block_is_mapped_once_and_returned_with_its_last_frame(
    tmp_path: Path, budget: int, *, adopted: bool
) -> None:
    sizes = [300_000, 400_000, 500_000]
    frames = make_block(sizes, MemoryAccount())
    for number, frame in enumerate(frames):
        os.pwrite(frame.fd, bytes([number + 1]) * frame.size, frame.offset)
    handle, woken = frames[0].hand_out("miss"), list[int]()
    assert handle.block is not None
    with handover_server(tmp_path, handle.fd) as ended:
        near, arena = LocalHandover({}), Arena(budget)
        arena.on_return = woken.append
        near.record_directory(HERE, f"{'a' * 32} {tmp_path}")
        block = f"{handle.block.size} {','.join(str(frame.offset) for frame in frames)}"
        leases = near.receive_frames(HERE, f"x.sock {'b' * 32} {sum(sizes)}", sizes, arena, block)
        views = [np.frombuffer(lease.view, np.uint8) for lease in leases]
        del leases
        for number, (view, size) in enumerate(zip(views, sizes, strict=True)):
            assert (view.size, set(view.tolist())) == (size, {number + 1})
        assert (arena.allocated == 0) == adopted
        views[0][:] = 9  # in this process only
        assert os.pread(handle.fd, 1, 0) == b"\1"
        if adopted:
            kept = views.pop()
            del view
            views.clear()
            gc.collect()
            assert not woken
            assert not ended.is_set()
            del kept
            assert woken == [3]
            assert arena.free_bytes() == budget
    handle.close()


@pytest.mark.parametrize("block", ["9 0,4096", "8192 0", "8192 1,4096", "8192 0,8192"])
def test_a_block_that_does_not_fit_its_memory_is_refused(tmp_path: Path, block: str) -> None:
    frames = make_block([10, 20], MemoryAccount())
    handle = frames[0].hand_out("miss")
    with handover_server(tmp_path, handle.fd):
        near = LocalHandover({})
        near.record_directory(HERE, f"{'a' * 32} {tmp_path}")
        with pytest.raises(HandoverError):
            near.receive_frames(HERE, f"x.sock {'b' * 32} 30", [10, 20], Arena(1 << 20), block)
    handle.close()


@pytest.mark.parametrize(
    "said",
    ["", "no", f"{'a' * 32} relative", f"{'g' * 32} /tmp", f"{'a' * 32} /tmp\x00x", f"{'a' * 32} /dev"],
)
def test_what_a_server_says_of_its_place_is_not_believed_unseen(said: str) -> None:
    near = LocalHandover({})
    near.record_directory(HERE, said)
    assert near.handover_id(HERE) == ""
