"""`mesh.Writer` over a daemon: samples come back as written, and a writer goes on where another ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import threading
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from botocore.exceptions import ClientError

import meshsdk as mesh
from meshsdk import ops
from meshsdk.errors import ClosedError, ConfigurationError, NotFoundError
from tests.support.bounded_wait import await_true

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.client.s3_client import Client
    from tests.support.daemons import Daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client:
        yield client


def sample(number: int) -> dict[str, Any]:
    return {
        "bin": number.to_bytes(4, "little") * 100,
        "txt": f"número {number}",
        "cls": np.int64(number % 3),
        "score": number / 7,
        "json": {"seed": number, "tags": ["a"]},
        "npy": np.arange(number, number + 6, dtype=np.float32).reshape(2, 3),
    }


def keys(client: Client, bucket: str, prefix: str = "") -> list[str]:
    return [entry.key for entry in client.list(bucket, prefix)]


def members(client: Client, bucket: str, key: str) -> list[str]:
    with tarfile.open(fileobj=BytesIO(client.get(bucket, key))) as shard:
        return shard.getnames()


def test_samples_come_back_as_they_were_written(client: Client, bucket: str) -> None:
    with mesh.Writer(f"s3://{bucket}/made", shard_samples=4, client=client) as out:
        for number in range(10):
            out.write(sample(number))
    assert (out.samples, out.shards) == (10, 3)
    assert keys(client, bucket) == [f"made/shard-{number:06d}.tar" for number in range(3)]
    fields = {"raw": "bin", "text": "txt", "label": "cls", "array": "npy", "facts": "json"}
    ds = mesh.open(f"s3://{bucket}/made", fields=fields, client=client)
    ds = ds.map(
        ops.frombuffer("raw", "uint8", shape=(400,)),
        ops.int_label("label"),
        ops.npy("array"),
        ops.raw("facts"),
    )
    assert len(ds) == 10
    for number, found in enumerate(ds):
        expected = sample(number)
        assert found["raw"].tobytes() == expected["bin"]
        assert bytes(found["text"]).decode() == expected["txt"]
        assert found["label"] == number % 3
        assert np.array_equal(found["array"], expected["npy"])
        assert json.loads(bytes(found["facts"])) == expected["json"]


class InterruptedFile:
    """A file in which one write is interrupted, as by Ctrl-C; `number`: which one."""

    def __init__(self, file: Any, number: int) -> None:
        self._file, self._left = file, number

    def write(self, data: bytes) -> int:
        self._left -= 1
        if not self._left:
            self._file.write(data[: len(data) // 2])
            raise KeyboardInterrupt
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> InterruptedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@pytest.mark.parametrize("number", [7, 8, 9, 10, 11])  # a file of a sample takes three writes, or two
def test_a_sample_whose_writing_is_interrupted_is_in_no_shard(
    client: Client, bucket: str, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def write(resume: bool) -> int:
        with mesh.Writer(f"s3://{bucket}/made", resume=resume, client=client) as out:
            for each in range(out.position, 3):
                out.write({"txt": f"text {each}", "cls": each})
        return out.position

    real = tempfile.TemporaryFile
    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "TemporaryFile", lambda **more: InterruptedFile(real(**more), number))
        with pytest.raises(KeyboardInterrupt):
            write(resume=False)
    assert write(resume=True) == 1
    found = [name for key in keys(client, bucket) for name in members(client, bucket, key)]
    assert found == [f"shard-{each:09d}.{end}" for each in range(3) for end in ("txt", "cls")]
    ds = mesh.open(f"s3://{bucket}/made", fields={"text": "txt", "label": "cls"}, client=client)
    assert [bytes(sample["text"]) for sample in ds] == [b"text 0", b"text 1", b"text 2"]


def test_shards_are_the_bytes_that_tarfile_writes(client: Client, bucket: str) -> None:
    """Whatever release wrote a shard first: a repeated request is recognised by its bytes."""
    with mesh.Writer(f"s3://{bucket}/made", client=client) as out:
        for number, size in enumerate([0, 1, 512, 513, 9000]):
            out.write({"bin": bytes(range(256)) * 36 if size == 9000 else b"x" * size}, key=f"ä/{number}")
        out.write({"bin": b"long"}, key="k" * 300)
    expected = BytesIO()
    with tarfile.open(fileobj=expected, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for number, size in enumerate([0, 1, 512, 513, 9000]):
            data = bytes(range(256)) * 36 if size == 9000 else b"x" * size
            info = tarfile.TarInfo(f"ä/{number}.bin")
            info.size = len(data)
            tar.addfile(info, BytesIO(data))
        info = tarfile.TarInfo("k" * 300 + ".bin")
        info.size = 4
        tar.addfile(info, BytesIO(b"long"))
    assert client.get(bucket, "made/shard-000000.tar") == expected.getvalue()


def test_equal_samples_are_equal_bytes(client: Client, bucket: str) -> None:
    for folder in ("one", "two"):
        with mesh.Writer(f"s3://{bucket}/{folder}", client=client) as out:
            for number in range(5):
                out.write(sample(number))
    [one, two] = [client.get(bucket, key) for key in keys(client, bucket)]
    assert one == two


def test_shards_end_by_size(client: Client, bucket: str) -> None:
    with mesh.Writer(f"s3://{bucket}/", shard_bytes="100KB", client=client) as out:
        for _ in range(20):
            out.write({"bin": bytes(30_000)})
    sizes = [entry.size for entry in client.list(bucket)]
    assert len(sizes) == out.shards == 5
    assert max(sizes) < 100_000 + 31_000 + 10_240


def test_a_writer_goes_on_behind_the_last_stored_shard(client: Client, bucket: str) -> None:
    def write(stop: int, fail: bool = False) -> mesh.Writer:
        with mesh.Writer(f"s3://{bucket}/made", shard_samples=4, resume=True, client=client) as out:
            for number in range(out.position, 10):
                if number == stop:
                    raise ZeroDivisionError
                out.write({"cls": number})
        return out

    for stop in (3, 3, 9):  # the open shard of a block that raises is stored, too
        with pytest.raises(ZeroDivisionError):
            write(stop)
    assert write(99).samples == 10
    assert write(99).position == 10
    found = [name for key in keys(client, bucket) for name in members(client, bucket, key)]
    assert found == [f"shard-{number:09d}.cls" for number in range(10)]
    with pytest.raises(ConfigurationError, match=r"4 shards of 10 samples .*resume=True"):
        mesh.Writer(f"s3://{bucket}/made", client=client)
    with pytest.raises(ConfigurationError, match="'cls' is text, and was a number before"):
        mesh.Writer(f"s3://{bucket}/made", resume=True, client=client).write({"cls": "one"})


def test_a_killed_writer_has_lost_only_its_last_shards(daemon: Daemon, client: Client, bucket: str) -> None:
    program = f"""
        import meshsdk as mesh
        with mesh.Writer("s3://{bucket}/made", shard_samples=10, resume=True) as out:
            print(out.position, flush=True)
            for number in range(out.position, 1000):
                out.write({{"cls": number}})
                if out.samples == 35:
                    print("in the middle", flush=True)
                    input()
    """
    env = os.environ | {
        "MESH_ENDPOINT": daemon.endpoint,
        "AWS_ACCESS_KEY_ID": daemon.access_key,
        "AWS_SECRET_ACCESS_KEY": daemon.secret_key,
    }
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
        text=True,
    )
    assert child.stdout is not None
    with child:
        assert child.stdout.readline() == "0\n"
        assert child.stdout.readline() == "in the middle\n"
        # A request of a dead process may still be carried out: none is in progress after this one.
        await_true(lambda: any("shard-000002" in key for key in keys(client, bucket)))
        child.send_signal(signal.SIGKILL)
        child.wait(60)
    with mesh.Writer(f"s3://{bucket}/made", shard_samples=10, resume=True, client=client) as out:
        assert out.position == 30
        for number in range(out.position, 60):
            out.write({"cls": number})
    found = [name for key in keys(client, bucket) for name in members(client, bucket, key)]
    assert found == [f"shard-{number:09d}.cls" for number in range(60)]


class _Delay:
    """A proxy in front of a daemon that keeps the requests with `what` in their first line back, whole, until
    `release`, and sends them also if their client is gone."""

    def __init__(self, daemon: Daemon, what: bytes) -> None:
        self._port, self._what = int(daemon.endpoint.rpartition(":")[2]), what
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.kept, self.release, self.answered = threading.Event(), threading.Event(), threading.Event()
        self.answer = b""
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(near,), daemon=True))
            self._threads[-1].start()

    def _serve(self, near: socket.socket) -> None:
        with near, socket.create_connection(("127.0.0.1", self._port), 30) as far:
            near.settimeout(60)
            while request := _request(near):
                late = self._what in request.partition(b"\r\n")[0]
                if late:
                    self.kept.set()
                    assert self.release.wait(60)
                far.sendall(request)
                answer = _answer(far, head=request.startswith(b"HEAD"))
                if late:
                    self.answer = answer
                    self.answered.set()
                with contextlib.suppress(OSError):
                    near.sendall(answer)

    def close(self) -> None:
        self.release.set()
        self._listener.close()


def _request(connection: socket.socket) -> bytes:
    """The next request of a connection; b"" at its end."""
    return _message(connection, has_body=True)


def _answer(connection: socket.socket, *, head: bool) -> bytes:
    return _message(connection, has_body=not head)


def _message(connection: socket.socket, *, has_body: bool) -> bytes:
    found = b""
    try:
        while b"\r\n\r\n" not in found:
            if not (piece := connection.recv(1 << 16)):
                return b""
            found += piece
        headers, _, body = found.partition(b"\r\n\r\n")
        lengths = [line for line in headers.lower().splitlines() if line.startswith(b"content-length:")]
        left = int(lengths[0].partition(b":")[2]) - len(body) if lengths and has_body else 0
        while left > 0:
            piece = connection.recv(min(left, 1 << 16))
            found, left = found + piece, left - len(piece)
            if not piece:
                return b""
    except OSError:
        return b""
    return found


def _delayed(daemon: Daemon, program: str, late: bytes) -> _Delay:
    """The proxy that has the last request of a program that was killed meanwhile."""
    delay = _Delay(daemon, late)
    env = os.environ | {
        "MESH_ENDPOINT": delay.endpoint,
        "AWS_ACCESS_KEY_ID": daemon.access_key,
        "AWS_SECRET_ACCESS_KEY": daemon.secret_key,
    }
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], env=env, text=True)
    with child:
        assert delay.kept.wait(60)
        child.send_signal(signal.SIGKILL)
        child.wait(60)
    return delay


_KILLED = """
    import os
    import meshsdk as mesh
    with mesh.Writer("s3://{bucket}/made", shard_samples=10, resume=True) as out:
        for number in range(out.position, 1000):
            out.write({{"bin": {value}}})
"""


@pytest.mark.parametrize("value", ["number.to_bytes(4, 'little') * 1000", "os.urandom(4000)"])
@pytest.mark.parametrize("late", [0, 2])
def test_a_request_of_a_killed_writer_that_arrives_late_is_met(
    daemon: Daemon, client: Client, bucket: str, value: str, late: int
) -> None:
    """The writer that continues has looked before it arrived. Equal shards are the same; of others, another
    start continues behind the one that came late."""
    key = f"made/shard-{late:06d}.tar"
    delay = _delayed(daemon, _KILLED.format(bucket=bucket, value=value), key.encode())
    try:
        assert key not in keys(client, bucket)
        out = mesh.Writer(f"s3://{bucket}/made", shard_samples=10, resume=True, client=client)
        assert out.position == late * 10
        delay.release.set()
        assert delay.answered.wait(60)
        assert delay.answer.startswith(b"HTTP/1.1 200")
        stored = client.get(bucket, key)

        def write(out: mesh.Writer) -> None:
            with out:
                for number in range(out.position, 45):
                    out.write({"bin": number.to_bytes(4, "little") * 1000})

        if "urandom" in value:
            with pytest.raises(ConfigurationError, match=f"{key} has been written by another writer"):
                write(out)
            out = mesh.Writer(f"s3://{bucket}/made", shard_samples=10, resume=True, client=client)
            assert out.position == late * 10 + 10
        write(out)
        assert client.get(bucket, key) == stored
        assert (out.samples, out.shards) == (45, 5)
    finally:
        delay.close()
    found = [name for key in keys(client, bucket) for name in members(client, bucket, key)]
    assert found == [f"shard-{number:09d}.bin" for number in range(45)]


def test_equal_writers_side_by_side_are_one_until_they_differ(client: Client, bucket: str) -> None:
    url = f"s3://{bucket}/made"
    with mesh.Writer(url, shard_samples=2, client=client) as one, mesh.Writer(url, client=client) as two:
        for number in range(2):
            one.write({"cls": number})
        one.close()
        two.write({"cls": 0})
        with pytest.raises(ConfigurationError, match=r"shard-000000\.tar has been written by another writer"):
            two.close()
    with mesh.Writer(f"{url}/2", client=client) as one, mesh.Writer(f"{url}/2", client=client) as two:
        one.write({"cls": 0})
        one.close()
        two.write({"cls": 0})
        two.close()
        assert two.shards == 1
    with mesh.Writer(f"{url}/3", client=client) as one, mesh.Writer(f"{url}/3", client=client) as two:
        one.write({"cls": 0})
        one.close()
        two.write({"cls": 1})  # of the same length
        with pytest.raises(ConfigurationError, match=r"shard-000000\.tar has been written by another writer"):
            two.close()


def test_writers_side_by_side_have_names(client: Client, bucket: str) -> None:
    url = f"s3://{bucket}/made"
    with mesh.Writer(url, client=client) as one, mesh.Writer(url, client=client) as two:
        one.write({"cls": 1})
        one.close()
        two.write({"cls": 2})
        with pytest.raises(ConfigurationError, match=r"shard-000000\.tar has been written by another writer"):
            two.close()
    assert client.get(bucket, "made/shard-000000.tar").count(b"1") > 0
    with mesh.Writer(url, name="rank-1", client=client) as other:
        other.write({"cls": 2}, key="cat/0001")
    assert members(client, bucket, "made/rank-1-000000.tar") == ["cat/0001.cls"]


def test_a_failed_shard_ends_the_writer(daemon: Daemon, client: Client, s3: Any) -> None:
    s3.create_bucket(Bucket="will-be-gone")
    out = mesh.Writer("s3://will-be-gone/x", shard_samples=1, client=client)
    s3.delete_bucket(Bucket="will-be-gone")
    out.write({"cls": 1})
    with pytest.raises(NotFoundError):
        out.write({"cls": 2})
    with pytest.raises(ClosedError):
        out.write({"cls": 3})
    out.close()
    assert "closed" in repr(out)
    with pytest.raises(ClientError):
        s3.head_bucket(Bucket="will-be-gone")
    with pytest.raises(NotFoundError):
        mesh.Writer("s3://will-be-gone/x", client=client)


def test_wrong_samples_are_refused_and_the_others_stay(client: Client, bucket: str) -> None:
    with mesh.Writer(f"s3://{bucket}/made", optional=("txt",), client=client) as out:
        out.write({"jpg": b"1", "cls": 1})
        out.write({"jpg": b"2", "cls": 2, "txt": "two"})
        for wrong, told in (
            ({"jpg": b"3"}, "sample 2 lacks cls"),
            ({"jpg": b"3", "cls": 3, "png": b""}, "has the field 'png'"),
            ({"jpg": b"3", "cls": "three"}, "'cls' is text, and was a number before"),
            ({"jpg": np.zeros(3), "cls": 3}, "'jpg' is a ndarray: name the field 'npy'"),
            ({"jpg": object(), "cls": 3}, "'jpg' is a object: encode it to bytes"),
            ({"jpg": b"3", "cls": True}, "'cls' is a bool"),
            ({"": b"3"}, "is not a field"),
            ({}, "has no fields"),
        ):
            with pytest.raises(ConfigurationError, match=told):
                out.write(wrong)
        for key in ("a.b", "/a", "", "../x", "shard-000000001"):
            with pytest.raises(ConfigurationError):
                out.write({"jpg": b"3", "cls": 3}, key=key)
        assert out.samples == 2
    names = members(client, bucket, "made/shard-000000.tar")
    stems = [name.removeprefix("shard-00000000") for name in names]
    assert stems == ["0.jpg", "0.cls", "1.jpg", "1.cls", "1.txt"]


def test_values(client: Client, bucket: str) -> None:
    with mesh.Writer(f"s3://{bucket}/made", client=client) as out:
        out.write({"mask.npy": torch.arange(4).reshape(2, 2).T, "n": np.float32(0.5), "json": "text"})
        with pytest.raises(ConfigurationError, match="cannot be written as JSON"):
            out.write({"mask.npy": np.arange(4), "n": 1, "json": float("nan")})
        with pytest.raises(ConfigurationError, match=r"is an array of int32, and was an array of int64"):
            out.write({"mask.npy": np.arange(4, dtype=np.int32), "n": 1, "json": None})
    with tarfile.open(fileobj=BytesIO(client.get(bucket, "made/shard-000000.tar"))) as shard:
        stored = {name.partition(".")[2]: shard.extractfile(name).read() for name in shard.getnames()}  # type: ignore[union-attr]
    assert np.load(BytesIO(stored["mask.npy"])).tolist() == [[0, 2], [1, 3]]
    assert stored["n"] == b"0.5"
    assert stored["json"] == b'"text"'


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "a/b"},
        {"name": ""},
        {"shard_bytes": 0},
        {"shard_bytes": "many"},
        {"shard_samples": 0},
        {"shard_samples": True},
    ],
)
def test_wrong_arguments(client: Client, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        mesh.Writer("s3://any/made", client=client, **wrong)
    with pytest.raises(ConfigurationError, match="s3://"):
        mesh.Writer("made", client=client)
