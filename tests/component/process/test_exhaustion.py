"""A node without free descriptors or processes, and a mesh whose etcd is full.

What runs goes on, what was acknowledged stays, and everything works again when there is room."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from base64 import b64encode
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import ClientError

from meshd.control.control_api import ControlError
from tests.support.attack_costs import costs, timed
from tests.support.bounded_wait import await_true
from tests.support.daemon_cluster import DaemonCluster
from tests.support.daemons import Daemon, DaemonFailedError
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BUCKET = "kept"
_LIMIT = 160
_NOBODY = 61_234
"""A user without other processes: the kernel counts the processes of a user."""


def _await(holds: Callable[[], bool], what: str, patience: float = 60.0) -> None:
    await_true(holds, patience, told=lambda: what)


def _reads(daemon: Daemon, key: str) -> bytes:
    found: bytes = daemon.client().get_object(Bucket=_BUCKET, Key=key)["Body"].read()
    return found


# descriptors ----------------------------------------------------------------------------------------------


@pytest.fixture
def few_files(tmp_path: Path) -> Iterator[Daemon]:
    """No process of it may open more files than _LIMIT."""
    daemon = Daemon(tmp_path / "data", (), {}, 1)
    daemon.prefix = ("prlimit", f"--nofile={_LIMIT}:{_LIMIT}")
    daemon.up()
    with daemon:
        daemon.client().create_bucket(Bucket=_BUCKET)
        yield daemon


def _address(daemon: Daemon) -> tuple[str, int]:
    where = urlsplit(daemon.endpoint)
    return str(where.hostname), int(where.port or 0)


def test_more_connections_than_descriptors(few_files: Daemon) -> None:
    few_files.client().put_object(Bucket=_BUCKET, Key="before", Body=b"before")
    with costs(few_files, f"{2 * _LIMIT} idle connections"), ExitStack() as stack:
        for _ in range(2 * _LIMIT):
            with suppress(OSError):
                stack.enter_context(socket.create_connection(_address(few_files), timeout=5))
        assert few_files.running, few_files.output()
        assert _reads(few_files, "before") == b"before"  # the idle make room for who asks for something
        few_files.client().put_object(Bucket=_BUCKET, Key="meanwhile", Body=b"x" * 300_000)
    assert _reads(few_files, "meanwhile") == b"x" * 300_000
    assert "Traceback" not in few_files.output()


@pytest.mark.timeout(480)
def test_more_uploads_than_descriptors(few_files: Daemon) -> None:
    """Each upload beyond the largest small object holds a file open until its body is there."""
    connections, kept = [], list[str]()
    try:
        signer = few_files.client()
        for number in range(2 * _LIMIT):
            kept.append(f"u{number}")
            connections.append(_begin_upload(few_files, signer, f"u{number}"))
        assert _reads_or_refuses(few_files, signer)
    finally:
        for connection in connections:
            connection.close()
    _await(lambda: _stores(few_files), "no upload succeeds after the others went away", 100)
    found = few_files.client().list_objects_v2(Bucket=_BUCKET).get("Contents", [])
    assert not {entry["Key"] for entry in found} & set(kept), "an upload without its end is visible"
    few_files.restart()
    assert _reads(few_files, "after") == b"after" * 100_000
    assert "Traceback" not in few_files.output()


def _begin_upload(daemon: Daemon, signer: Any, key: str) -> socket.socket:
    """The head of a PUT of 2 MiB and half of the body, presigned."""
    url = urlsplit(signer.generate_presigned_url("put_object", {"Bucket": _BUCKET, "Key": key}))
    head = f"PUT {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: {2 << 20}\r\n\r\n"
    sock = socket.socket()
    sock.settimeout(1)  # a node without a descriptor takes no connection, and what it is sent waits
    with suppress(OSError):
        sock.connect(_address(daemon))
        sock.sendall(head.encode() + bytes(1 << 20))
    return sock


def _reads_or_refuses(daemon: Daemon, signer: Any) -> bool:
    """It answers, with the object's absence or that it has no room for another request; or the connection
    waits for a descriptor, which takes as long as the uploads do."""
    url = urlsplit(signer.generate_presigned_url("get_object", {"Bucket": _BUCKET, "Key": "none"}))
    with suppress(OSError), closing(daemon.connect()) as connection:
        connection.timeout = 5
        connection.request("GET", f"{url.path}?{url.query}")
        return connection.getresponse().status in (404, 503)
    return daemon.running


def _stores(daemon: Daemon) -> bool:
    with suppress(ClientError, OSError):
        daemon.client().put_object(Bucket=_BUCKET, Key="after", Body=b"after" * 100_000)
        return True
    return False


@pytest.mark.parametrize("limit", [20, 30, 40])
def test_a_node_that_cannot_start_with_so_few_descriptors_says_what_to_do(tmp_path: Path, limit: int) -> None:
    serve = ("serve", "--data-dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0", "--workers", "1")
    done = _limited(limit, "meshd", *serve, "--transform-workers", "2")
    assert done.returncode in (1, 2), done.stderr
    *_, last = done.stderr.splitlines()
    assert last.startswith("meshd: "), done.stderr
    assert last.endswith(
        f"too many open files: the limit of this process is {limit}; raise it with `ulimit -n`"
    )
    assert "Traceback" not in done.stderr + done.stdout


def _limited(limit: int, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ("prlimit", f"--nofile={limit}:{limit}", sys.executable, "-m", module, *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


_FULL = """
import os, resource, sys
from meshsdk.cli import run
{imports}
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
try:
    while True:
        os.dup(0)
except OSError:
    pass
sys.exit(run({arguments}))
"""


@pytest.mark.parametrize("imports", ["", "import meshsdk.cli.objects, meshsdk.client.s3_client"])
@pytest.mark.parametrize("as_json", [False, True])
def test_a_command_without_descriptors_says_what_to_do(
    few_files: Daemon, imports: str, as_json: bool
) -> None:
    arguments = ["ls", "--deadline", "1", *(["--json"] if as_json else [])]
    done = subprocess.run(
        [sys.executable, "-c", _FULL.format(imports=imports, arguments=arguments)],
        env={
            **os.environ,
            "MESH_ENDPOINT": few_files.endpoint,
            "AWS_ACCESS_KEY_ID": few_files.access_key,
            "AWS_SECRET_ACCESS_KEY": few_files.secret_key,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    told = "too many open files: the limit of this process is 40; raise it with `ulimit -n`"
    assert done.returncode == 1, done.stderr
    assert (json.loads(done.stderr)["message"] if as_json else done.stderr) == (
        told if as_json else f"mesh: {told}\n"
    )


_LOADERS = """
import os, resource
import meshsdk as mesh
from meshsdk.errors import ConfigurationError
dataset = mesh.open("s3://rows/", {"text": "txt"})
loader = mesh.Loader(dataset, 2, rank=0, world=1, output="numpy")
assert sum(1 for _ in loader) == 2  # everything is imported
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.dup(0))
except OSError:
    pass
try:
    next(iter(loader))
except ConfigurationError as error:
    print(error)
while held:
    os.close(held.pop())
print(sum(len(batch["text"]) for batch in loader))
"""


def test_a_loader_without_descriptors_says_what_to_do(few_files: Daemon) -> None:
    with closing(few_files.client()) as client:
        client.create_bucket(Bucket="rows")
        for number in range(4):
            client.put_object(Bucket="rows", Key=f"{number}.txt", Body=b"text")
    environment = {
        "MESH_ENDPOINT": few_files.endpoint,
        "AWS_ACCESS_KEY_ID": few_files.access_key,
        "AWS_SECRET_ACCESS_KEY": few_files.secret_key,
    }
    done = subprocess.run(
        [sys.executable, "-c", _LOADERS],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    told = "too many open files: the limit of this process is 64; raise it with `ulimit -n`"
    told = f"a loader cannot start: {told}"
    assert done.stdout.splitlines() == [told, "4"], done.stderr


# processes ------------------------------------------------------------------------------------------------


@pytest.fixture
def as_nobody() -> Iterator[Daemon]:
    """Run by a user of its own, for whom a limit of processes holds."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("not run here: takes root and setpriv")
    with TemporaryDirectory() as folder:  # not pytest's, which others may not enter
        os.chown(folder, _NOBODY, _NOBODY)
        daemon = Daemon(Path(folder) / "data", (), {}, 1)
        daemon.prefix = ("setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups")
        daemon.up()
        with daemon:
            daemon.client().create_bucket(Bucket=_BUCKET)
            yield daemon


def _limit_processes(daemon: Daemon, room: int) -> None:
    """Threads and processes of this user, at most so many more than there are."""
    pids = [daemon.pid, *daemon.children().values()]
    threads = sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids)
    for pid in pids:
        run = (*daemon.prefix, "prlimit", f"--nproc={threads + room}:", f"--pid={pid}")
        subprocess.run(run, check=True, timeout=60)  # as the same user: root may not everywhere


def test_no_process_can_be_started(as_nobody: Daemon) -> None:
    client = as_nobody.client()
    client.put_object(Bucket=_BUCKET, Key="before", Body=b"before" * 100_000)
    _limit_processes(as_nobody, room=-10)  # also after the death of one with its threads
    as_nobody.signal_child("transform-0")
    _await(lambda: "transform-0 cannot be started" in as_nobody.output(), "the supervisor does not say so")
    with costs(as_nobody, "20 × PUT 1 KB, PUT 2 MiB, GET 2 MiB without room for a process"):
        for number in range(20):
            client.put_object(Bucket=_BUCKET, Key=f"small-{number}", Body=b"x" * 1000)
            client.put_object(Bucket=_BUCKET, Key=f"large-{number}", Body=b"x" * (2 << 20))
            assert _reads(as_nobody, f"large-{number}") == b"x" * (2 << 20)
    assert _reads(as_nobody, "before") == b"before" * 100_000
    _limit_processes(as_nobody, room=1000)
    with timed("until the transform process is back"):
        _await(lambda: "transform-0" in as_nobody.children(), "the transform process is not started again")
    with suppress(DaemonFailedError):
        assert as_nobody.stop() == 0
    as_nobody.up()
    for number in range(20):
        assert _reads(as_nobody, f"small-{number}") == b"x" * 1000


# etcd -----------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh() -> Iterator[DaemonCluster]:
    require_etcd()
    with DaemonCluster.start(3, etcd_flags=("--quota-backend-bytes=4000000",)) as found:
        yield found


def test_a_full_etcd(mesh: DaemonCluster) -> None:
    client = mesh["n1"].client()
    client.create_bucket(Bucket=_BUCKET)
    with timed("60 × PUT at three nodes, etcd with room"):
        _put_everywhere(mesh)
    _fill_etcd(mesh)
    with pytest.raises(ClientError) as refused:
        client.create_bucket(Bucket="another")
    assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503
    with timed("60 × PUT at three nodes, etcd full"):
        _put_everywhere(mesh)
    with timed("until the status says that etcd is full"):
        _await(lambda: _says(mesh["n2"], "etcd rejects writes"), "the status does not say that etcd is full")
    _make_room(mesh)
    with timed("until a bucket can be created again"):
        _await(lambda: _makes_bucket(mesh, "another"), "no bucket can be made though etcd has room again")
    mesh.kill("n3")
    mesh.await_state("n3", "away")
    client = mesh["n1"].client()
    for number in range(20):
        for node in mesh.nodes.values():
            key = f"{node.endpoint[-5:]}-{number}"
            assert client.get_object(Bucket=_BUCKET, Key=key)["Body"].read() == b"kept"


def _fill_etcd(mesh: DaemonCluster) -> None:
    """Until it refuses writes."""
    value = b64encode(bytes(100_000)).decode()
    with closing(mesh.etcd.gateway()) as gateway:
        said = ""
        while "space" not in said:
            key = b64encode(b"filler/" + token_hex(8).encode()).decode()
            try:
                gateway.call("kv/put", {"key": key, "value": value}, repeatable=True)
            except ControlError as error:
                said = str(error)


def _make_room(mesh: DaemonCluster) -> None:
    """As etcd's own page on maintenance says: compact, defragment, disarm."""
    first, last = (b64encode(name).decode() for name in (b"filler/", b"filler0"))
    with closing(mesh.etcd.gateway()) as gateway:
        gone = gateway.call("kv/deleterange", {"key": first, "range_end": last}, repeatable=True)
        revision = gone["header"]["revision"]
        gateway.call("kv/compaction", {"revision": revision, "physical": True}, repeatable=True)
        gateway.call("maintenance/defragment", {}, repeatable=True)
        for alarm in gateway.call("maintenance/alarm", {"action": "GET"}, repeatable=True)["alarms"]:
            gateway.call("maintenance/alarm", alarm | {"action": "DEACTIVATE"}, repeatable=True)


def _put_everywhere(mesh: DaemonCluster) -> None:
    for node in mesh.nodes.values():
        client = node.client()
        for number in range(20):
            client.put_object(Bucket=_BUCKET, Key=f"{node.endpoint[-5:]}-{number}", Body=b"kept")


def _says(node: Daemon, words: str) -> bool:
    return words in node.request("GET", "/-/cluster").body.decode()


def _makes_bucket(mesh: DaemonCluster, name: str) -> bool:
    with suppress(ClientError):
        mesh["n1"].client().create_bucket(Bucket=name)
        return True
    return False
