"""Users' ops on a real daemon: pushed, pinned, run in plans and views, refused, removed; their crashes
contained."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import threading
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from botocore.exceptions import ClientError
from PIL import Image

import meshsdk
from meshsdk import ops
from meshsdk.admin import op_catalog
from meshsdk.cli import run
from meshsdk.errors import (
    AccessError,
    BadSampleError,
    InvalidPlanError,
    MeshError,
    NotFoundError,
    ServerError,
)
from tests.support.bounded_wait import await_end
from tests.support.daemons import Daemon
from tests.support.s3_raw import Wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.client.s3_client import Client

COUNT = 24
SOURCE = b'''
import ctypes, os, time
import numpy as np
from meshsdk.userops import BYTES, BadSample, array, image, op

@op(input=image("h", "w", 3), output=image("h", "w", 3), memory=128 << 20)
def brighten(pixels, *, gain: float = 1.5):
    """Pixels times gain."""
    return np.clip(pixels * gain, 0, 255).astype(np.uint8)

@op(input=image("h", "w", 3), output=array("float32", (3, "size", "size")), memory=128 << 20)
def patch(pixels, *, random, size: int = 16):
    """A random square."""
    height, width, _ = pixels.shape
    top, left = random.integer(height - size + 1), random.integer(width - size + 1)
    return pixels[top : top + size, left : left + size].transpose(2, 0, 1).astype(np.float32)

@op(input=BYTES, output=array("int64", ()), memory=128 << 20)
def listed(data, *, table: bytes, other: bytes = None):
    """Its length, looked up."""
    return np.int64(int(table.split()[len(data) % 2]) + (int(other) if other else 0))

@op(input=BYTES, output=array("int64", ()), seconds=2.5, memory=128 << 20)
def trap(data, *, on: list, how: str):
    """Bad on samples of these sizes."""
    if len(data) in on:
        if how == "crash":
            ctypes.string_at(0)
        if how == "hang":
            time.sleep(3600)
        if how == "leak":
            np.ones(1 << 30)
        if how == "raise":
            raise RuntimeError("no good")
        if how == "refuse":
            raise BadSample("not mine")
        if how == "lie":
            return np.zeros(2, np.float32)
    return np.int64(len(data))
'''


def jpeg(number: int) -> bytes:
    rng = np.random.default_rng(number)
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (40, 48 + number, 3), dtype=np.uint8)).save(file, "JPEG")
    return file.getvalue()


def sizes() -> list[int]:
    return [len(jpeg(number)) for number in range(COUNT)]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon.start(workers=2) as running:
        s3 = running.client()
        s3.create_bucket(Bucket="photos")
        for number in range(COUNT):
            s3.put_object(Bucket="photos", Key=f"train/{number:04}.jpg", Body=jpeg(number))
        yield running


def connect(daemon: Daemon, access_key: str = "", secret_key: str = "") -> Client:
    return meshsdk.connect(
        daemon.endpoint,
        access_key=access_key or daemon.access_key,
        secret_key=secret_key or daemon.secret_key,
        deadline=30,
    )


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with connect(daemon) as made:
        yield made


@pytest.fixture
def pushed(client: Client) -> Iterator[op_catalog.Pushed]:
    yield op_catalog.push_module(client.transport, "mine", SOURCE)
    for module in op_catalog.list_modules(client.transport):
        op_catalog.remove_module(client.transport, module.module)


@pytest.fixture
def signed(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands sign as root."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", daemon.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", daemon.secret_key)


def dataset(client: Client) -> Any:
    return meshsdk.open("s3://photos/train/", fields={"image": "jpg"}, client=client)


def trap(client: Client, how: str, on: list[int]) -> Any:
    return dataset(client).map(ops.user("mine/trap", "image", on=on, how=how))


# --- plans and views ------------------------------------------------------------------------------------


def test_a_plan_runs_it_as_the_function_itself_would(client: Client, pushed: op_catalog.Pushed) -> None:
    names: dict[str, Any] = {}
    exec(SOURCE, names)
    ds = dataset(client).map(ops.decode("image"), ops.user("mine/brighten", "image", gain=2.0))
    for number in (0, 7, COUNT - 1):
        plain = dataset(client).map(ops.decode("image"))[number]["image"]
        expected = names["brighten"](np.asarray(plain), gain=2.0)
        assert np.array_equal(np.asarray(ds[number]["image"]), expected)


def test_random_ones_draw_the_same_for_every_world_size(client: Client, pushed: op_catalog.Pushed) -> None:
    ds = dataset(client).map(ops.decode("image"), ops.user("mine/patch", "image", size=8))
    whole = np.asarray(meshsdk.Loader(ds, global_batch=12, seed=3).at(1)["image"])
    assert whole.shape == (12, 3, 8, 8)
    assert whole.dtype == np.float32
    parts = [
        np.asarray(meshsdk.Loader(ds, global_batch=12, seed=3, rank=rank, world=3).at(1)["image"])
        for rank in range(3)
    ]
    assert np.array_equal(np.concatenate(parts), whole)
    assert not np.array_equal(np.asarray(meshsdk.Loader(ds, global_batch=12, seed=4).at(1)["image"]), whole)


def test_a_plan_keeps_the_build_it_was_made_with(client: Client, pushed: op_catalog.Pushed) -> None:
    before = dataset(client).map(ops.user("mine/trap", "image", on=[], how=""))
    loader = meshsdk.Loader(before, global_batch=4, seed=1, shuffle=False)
    was = np.asarray(loader.at(0)["image"]).tolist()
    newer = op_catalog.push_module(
        client.transport, "mine", SOURCE.replace(b"np.int64(len(data))", b"np.int64(-1)")
    )
    assert newer.version != pushed.version
    fresh = meshsdk.Loader(before, global_batch=4, seed=1, shuffle=False)
    assert np.asarray(fresh.at(0)["image"]).tolist() == [-1] * 4
    assert np.asarray(loader.at(1)["image"]).tolist() == sizes()[4:8]
    assert was == sizes()[:4]
    old = ops.user("mine/trap", "image", version=pushed.version, on=[], how="")
    pinned = meshsdk.Loader(dataset(client).map(old), global_batch=4, seed=1, shuffle=False)
    assert np.asarray(pinned.at(0)["image"]).tolist() == was


def test_a_build_that_was_removed_is_refused_until_it_is_pushed_again(
    client: Client, pushed: op_catalog.Pushed
) -> None:
    ds = trap(client, "", [])
    loader = meshsdk.Loader(ds, global_batch=4, seed=1, shuffle=False)
    loader.at(0)
    assert op_catalog.remove_module(client.transport, "mine", pushed.version) == (pushed.version,)
    for step in (0, 1):  # the first is in the node's cache of frames
        with pytest.raises(InvalidPlanError, match="push the same file again") as caught:
            loader.at(step)
        assert (caught.value.status, caught.value.code) == (410, "UnknownOpBuild")
    with pytest.raises(InvalidPlanError, match="there is no op 'mine/trap'"):
        trap(client, "", []).plan()
    again = op_catalog.push_module(client.transport, "mine", SOURCE)
    assert (again.version, again.new) == (pushed.version, True)
    assert np.asarray(loader.at(1)["image"]).tolist() == sizes()[4:8]


def test_an_argument_of_bytes_is_an_objects_content(client: Client, pushed: op_catalog.Pushed) -> None:
    client.put("photos", "tables/a", b"100 200")
    client.put("photos", "tables/b", b"7")

    def values(**args: str) -> list[int]:
        ds = dataset(client).map(ops.user("mine/listed", "image", **args))
        return list(map(int, meshsdk.Loader(ds, global_batch=8, seed=1, shuffle=False).at(0)["image"]))

    expected = [[100, 200][size % 2] for size in sizes()[:8]]
    assert values(table="s3://photos/tables/a") == expected
    assert values(table="s3://photos/tables/a", other="s3://photos/tables/b") == [v + 7 for v in expected]
    client.put("photos", "tables/a", b"1 2")
    assert values(table="s3://photos/tables/a") == [[1, 2][size % 2] for size in sizes()[:8]]
    with pytest.raises(NotFoundError, match="tables/none"):
        values(table="s3://photos/tables/none")


@pytest.mark.usefixtures("signed")
def test_views_run_it_too(daemon: Daemon, client: Client, pushed: op_catalog.Pushed) -> None:
    chain = ["--op", "decode", "--op", "mine/brighten gain=2", "--op", "encode format=png"]
    keys = ["--match", ".jpg", "--suffix", ".png", "--endpoint-url", daemon.endpoint]
    assert run(["view", "create", "photos--bright", *keys, *chain]) == 0
    body = daemon.client().get_object(Bucket="photos--bright", Key="train/0003.png")["Body"].read()
    plain = np.asarray(dataset(client).map(ops.decode("image"))[3]["image"])
    with Image.open(io.BytesIO(body)) as picture:
        expected = np.clip(plain.reshape(picture.height, picture.width, 3) * 2.0, 0, 255)
        assert np.array_equal(np.asarray(picture), expected.astype(np.uint8))
    op_catalog.remove_module(client.transport, "mine", pushed.version)
    again = daemon.client().get_object(Bucket="photos--bright", Key="train/0003.png")["Body"].read()
    assert again == body  # it was made before
    with pytest.raises(ClientError, match="push the same file again") as caught:
        daemon.client().get_object(Bucket="photos--bright", Key="train/0004.png")
    assert caught.value.response["Error"]["Code"] == "ViewOutdated"
    daemon.client().delete_bucket(Bucket="photos--bright")


# --- what goes wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("crash", r"its process ended \(SIGSEGV\) at mine.py, line \d+ in trap, twice"),
        ("hang", "took longer than 2.5 s for one sample, twice"),
        ("leak", "needed more than the 128 MiB of memory it has beyond its imports, twice"),
        ("raise", r"RuntimeError: no good \(mine.py:\d+\)"),
        ("refuse", "not mine"),
    ],
)
def test_a_sample_it_fails_on_is_bad_named_and_stood_in_for(
    client: Client, pushed: op_catalog.Pushed, how: str, reason: str
) -> None:
    bad = sizes()[5]
    ds = trap(client, how, [bad])
    with pytest.raises(BadSampleError, match=reason) as caught:
        meshsdk.Loader(ds, global_batch=8, seed=1, shuffle=False, on_bad="raise").at(0)
    assert caught.value.detail["op"] == "mine/trap"
    assert "train/0005" in caught.value.detail["key"]
    batch = meshsdk.Loader(ds, global_batch=8, seed=1, shuffle=False).at(0)
    values = np.asarray(batch["image"]).tolist()
    expected = sizes()[:8]
    assert values[:5] + values[6:] == expected[:5] + expected[6:]
    assert values[5] in set(sizes()) - {bad}
    assert batch.status.tolist() == [0, 0, 0, 0, 0, 1, 0, 0]


def test_an_op_that_lies_is_the_ops_defect(client: Client, pushed: op_catalog.Pushed) -> None:
    with pytest.raises(ServerError, match="mine/trap") as caught:
        meshsdk.Loader(trap(client, "lie", [sizes()[2]]), global_batch=4, seed=1, shuffle=False).at(0)
    assert caught.value.code == "OpFailed"


def test_other_jobs_batches_are_right_while_it_crashes(client: Client, pushed: op_catalog.Pushed) -> None:
    import threading

    honest = meshsdk.Loader(dataset(client).map(ops.decode("image")), global_batch=6, seed=5)
    expected = [[np.asarray(image) for image in honest.at(step)["image"]] for step in range(4)]
    crashing = trap(client, "crash", sizes())
    failures: list[Exception] = []

    def crash() -> None:
        for seed in range(2):
            try:
                meshsdk.Loader(crashing, global_batch=6, seed=seed, on_bad="mask", max_bad=1.0).at(0)
            except MeshError as error:
                failures.append(error)

    thread = threading.Thread(target=crash)
    thread.start()
    other = meshsdk.Loader(
        dataset(client).map(ops.decode("image"), ops.vflip("image", 0.0)), global_batch=6, seed=5
    )
    for step in range(4):
        for got, wanted in zip(other.at(step)["image"], expected[step], strict=True):
            assert np.array_equal(np.asarray(got), wanted)
    await_end(thread)
    assert failures == []


def test_its_processes_die_with_the_transforms(
    daemon: Daemon, client: Client, pushed: op_catalog.Pushed
) -> None:
    loader = meshsdk.Loader(trap(client, "", []), global_batch=4, seed=9)
    loader.at(0)
    transform = daemon.children()["transform-0"]
    confined = _children(transform)
    assert 1 <= len(confined) <= 4
    for pid in confined:
        assert daemon.secret_key.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    os.kill(transform, signal.SIGKILL)
    while any(Path(f"/proc/{pid}").exists() for pid in confined):
        pass
    assert len(loader.at(1)["image"]) == 4


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


# --- pushing ---------------------------------------------------------------------------------------------


def test_pushing_the_same_again_changes_nothing(client: Client, pushed: op_catalog.Pushed) -> None:
    again = op_catalog.push_module(client.transport, "mine", SOURCE)
    assert (again.new, again.version, again.ops) == (False, pushed.version, pushed.ops)
    other = op_catalog.push_module(client.transport, "mine", SOURCE + b"# more\n")
    (listed,) = op_catalog.list_modules(client.transport)
    assert [build.version for build in listed.builds] == [other.version, pushed.version]
    back = op_catalog.push_module(client.transport, "mine", SOURCE)
    assert back.new
    (listed,) = op_catalog.list_modules(client.transport)
    assert [build.version for build in listed.builds] == [pushed.version, other.version]
    assert listed.version == pushed.version


def test_a_draft_is_only_taken_by_its_version(client: Client, pushed: op_catalog.Pushed) -> None:
    drafts = [
        op_catalog.push_module(client.transport, "mine", SOURCE + b"# %d\n" % number, draft=True)
        for number in range(9)
    ]
    (listed,) = op_catalog.list_modules(client.transport)
    assert listed.version == pushed.version
    assert len(listed.builds) == 9  # the first draft made room for the last
    with pytest.raises(InvalidPlanError):
        dataset(client).map(ops.user("mine/brighten", "image", version=drafts[0].version)).plan()
    dataset(client).map(
        ops.decode("image"), ops.user("mine/brighten", "image", version=drafts[1].version)
    ).plan()
    op_catalog.push_module(client.transport, "only", SOURCE, draft=True)
    with pytest.raises(InvalidPlanError, match="no op 'only/brighten'"):
        dataset(client).map(ops.decode("image"), ops.user("only/brighten", "image")).plan()


IMPORT = b"from meshsdk.userops import BYTES, image, op\n"
WRITE = (
    r"(?s:.*)`from meshsdk.userops import image, op` at the top .* `@op\(input=image\('h', 'w', 3\), output="
)


@pytest.mark.parametrize(
    ("name", "source", "reason"),
    [
        ("Mine", SOURCE, "not a valid module name"),
        ("a/b", SOURCE, "not a valid module name"),
        ("mine", b"x = 1", "decorate functions with @op"),
        ("mine", b"def f(value): return value", WRITE),
        ("mine", IMPORT + b"@op\ndef f(value): return value", f"takes its types by name: .*{WRITE}"),
        ("mine", IMPORT + b"@op(BYTES, BYTES)\ndef f(value): return value", f"types by name: .*{WRITE}"),
        ("mine", IMPORT + b"@op(input=BYTES)\ndef f(value): return value", WRITE),
        ("mine", IMPORT + b"@op(input=BYTES, output=BYTES, p=1)\ndef f(v): return v", WRITE),
        ("mine", b"import meshsdk as mesh\n@mesh.op\ndef f(value): return value", WRITE),
        ("mine", b"@op(input=1)\ndef f(value): return value", WRITE),
        ("mine", b"import nosuchlibrary", r"nosuchlibrary.*--wheel NAME"),
        ("mine", b"def f(:\n", r"SyntaxError.*InvalidPlan\]$"),
        ("mine", b"from meshsdk import op", "`op` from meshsdk.userops"),
        ("mine", b"import socket\nsocket.create_connection(('127.0.0.1', 9))", "PermissionError"),
        ("mine", b"open('/etc/passwd').read()", "PermissionError"),
        ("mine", b"import ctypes\nctypes.string_at(0)", r"SIGSEGV"),
        ("mine", b"\xff\xfe", "not UTF-8"),
        ("mine", b"#" * ((1 << 20) + 1), "at most 1048576 are allowed"),
        ("mine", SOURCE.replace(b"seconds=2.5", b"seconds=3000"), "this node allows 30 s"),
    ],
)
def test_what_cannot_be_taken_is_refused_with_the_reason(
    client: Client, name: str, source: bytes, reason: str
) -> None:
    with pytest.raises(ServerError, match=reason):
        op_catalog.push_module(client.transport, name, source)
    assert op_catalog.list_modules(client.transport) == ()


def test_arguments_and_inputs_are_checked_when_a_plan_is_made(
    client: Client, pushed: op_catalog.Pushed
) -> None:
    def refused(*chain: Any) -> str:
        with pytest.raises(InvalidPlanError) as caught:
            dataset(client).map(*chain).plan()
        return str(caught.value)

    decode = ops.decode("image")
    assert "gain: expected float" in refused(decode, ops.user("mine/brighten", "image", gain="much"))
    assert "gainn: unknown field" in refused(decode, ops.user("mine/brighten", "image", gainn=1))
    assert "needs image (hwc) uint8[h×w×3]" in refused(ops.user("mine/brighten", "image"))
    assert "did you mean 'mine/brighten'" in refused(decode, ops.user("mine/brightn", "image"))
    assert "how: missing" in refused(ops.user("mine/trap", "image", on=[]))
    assert "no build" in refused(ops.user("mine/trap", "image", version="sha256:" + "0" * 64, on=[], how=""))


def test_who_may_push_is_a_policy(daemon: Daemon, client: Client, pushed: op_catalog.Pushed) -> None:
    _admin(daemon, "POST", "/-/admin/users", {"user_id": "maya"})
    key = json.loads(_admin(daemon, "POST", "/-/admin/keys", {"user_id": "maya"}))
    with connect(daemon, key["access_key"], key["secret_key"]) as maya:
        for call in (
            lambda: op_catalog.push_module(maya.transport, "hers", SOURCE),
            lambda: op_catalog.remove_module(maya.transport, "mine"),
        ):
            with pytest.raises(AccessError, match="nothing allows it"):
                call()
        policy = {
            "Version": "2012-10-17",
            "Statement": {"Effect": "Allow", "Action": "mesh:PushOp", "Resource": "arn:aws:mesh:::op/hers*"},
        }
        _admin(daemon, "PUT", "/-/admin/policies/push", policy)
        _admin(daemon, "PUT", "/-/admin/users/maya/policies/push", {})
        assert op_catalog.push_module(maya.transport, "hers", SOURCE).new
        with pytest.raises(AccessError):
            op_catalog.push_module(maya.transport, "mine", SOURCE)
        with pytest.raises(AccessError):
            op_catalog.remove_module(maya.transport, "hers")
        assert {module.module for module in op_catalog.list_modules(maya.transport)} == {"hers", "mine"}


def test_a_bounded_key_lists_what_its_policy_lets_it(daemon: Daemon, pushed: op_catalog.Pushed) -> None:
    def listed(*actions: str, resource: str = "*") -> list[str]:
        statement = {"Effect": "Allow", "Action": [*actions], "Resource": resource}
        policy = {"Version": "2012-10-17", "Statement": statement}
        made = json.loads(_admin(daemon, "POST", "/-/sts", {"policy": policy}))
        with contextlib.closing(
            Wire(
                daemon.endpoint,
                made["AccessKeyId"],
                made["SecretAccessKey"],
                session_token=made["SessionToken"],
            )
        ) as pod:
            return [item["module"] for item in json.loads(pod.call("GET", "/-/modules").body)["modules"]]

    assert listed("s3:*", "mesh:PushOp") == []
    assert listed("mesh:ListOps", resource="arn:aws:mesh:::op/others-*") == []
    assert "mine" in listed("mesh:ListOps", resource="arn:aws:mesh:::op/mi*")


def _admin(daemon: Daemon, method: str, path: str, document: dict[str, Any]) -> bytes:
    answer = daemon.request(method, path, json.dumps(document).encode())
    assert answer.status in (200, 201, 204), answer.body
    return answer.body


def test_content_that_nobody_pushed_is_never_run(
    daemon: Daemon, client: Client, pushed: op_catalog.Pushed
) -> None:
    """Not even where the node keeps it, as an asset somebody's plan named."""
    from meshd.transform.sandbox.user_op_definitions import encode_module, parse_module
    from meshwire.plan.op_declarations import parse_declarations

    (op, *_) = [item for item in pushed.ops if item["op"] == "mine/trap"]
    declared = {"name": "trap", "input": {"kind": "bytes"}, "output": {"kind": "bytes"}}
    data = encode_module("import os", parse_declarations([declared]))
    version = parse_module("mine", data).version
    client.put("photos", "module.json", data)
    plan = dataset(client).map(ops.user(op["op"], "image", version=version))
    with pytest.raises(InvalidPlanError, match="no build"):
        plan.plan()


def test_a_node_without_user_ops_says_so() -> None:
    with Daemon.start(args=["--user-ops", "off"]) as daemon, connect(daemon) as client:
        with pytest.raises(ServerError, match="does not run user ops") as caught:
            op_catalog.push_module(client.transport, "mine", SOURCE)
        assert caught.value.status == 501


def test_what_was_pushed_is_there_after_a_kill() -> None:
    with Daemon.start() as daemon, connect(daemon) as client:
        pushed = op_catalog.push_module(client.transport, "mine", SOURCE)
        client.create_bucket("photos")
        client.put("photos", "train/0000.jpg", jpeg(0))
        daemon.kill()
        daemon.up()
        (listed,) = op_catalog.list_modules(client.transport)
        assert listed.version == pushed.version
        assert int(np.asarray(trap(client, "", [])[0]["image"])) == len(jpeg(0))


def test_nothing_of_it_is_left_after_a_kill() -> None:
    """The supervisor is killed while an op hangs: no process goes on, and none had a file to leave."""
    with Daemon.start() as daemon, connect(daemon) as client:
        op_catalog.push_module(client.transport, "mine", SOURCE)
        client.create_bucket("photos")
        client.put("photos", "train/0000.jpg", jpeg(0))
        assert int(np.asarray(trap(client, "", [])[0]["image"])) == len(jpeg(0))
        family = [daemon.pid, *daemon.children().values()]
        confined = [pid for parent in family[1:] for pid in _children(parent)]
        assert confined
        for pid in confined:
            held = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
            assert all(name.startswith(("/memfd:", "socket:", "pipe:", "/dev/null")) for name in held), held
        hanging = threading.Thread(target=_in_vain, args=(trap(client, "hang", [len(jpeg(0))]),))
        hanging.start()
        daemon.kill()
        for _ in range(600):
            if not any(Path(f"/proc/{pid}").exists() for pid in (*family, *confined)):
                break
            threading.Event().wait(0.1)
        assert not [pid for pid in (*family, *confined) if Path(f"/proc/{pid}").exists()]
        daemon.up()
        await_end(hanging)


def _in_vain(dataset: Any) -> None:
    with contextlib.suppress(Exception):
        dataset[0]


# --- trying ------------------------------------------------------------------------------------------------


def test_trying_tells_what_came_out_and_what_does_not_repeat(
    client: Client, pushed: op_catalog.Pushed
) -> None:
    chain: list[dict[str, Any]] = [{"op": "decode"}, {"op": "mine/patch", "args": {"size": 8}}]
    samples = [f"s3://photos/train/{number:04}.jpg" for number in range(3)]
    trials = op_catalog.try_ops(client.transport, chain, samples, results=True)
    assert trials.output == "array float32[3×8×8]"
    assert trials.ops[1] == ("mine/patch", pushed.version)
    for trial in trials.results:
        assert (trial.error, trial.repeats) == ("", True)
        assert trial.result is not None
        assert np.load(io.BytesIO(trial.result)).shape == (3, 8, 8)
    counting = b"""
from meshsdk.userops import BYTES, op
seen = []
@op(input=BYTES, output=BYTES)
def remember(data):
    seen.append(data)
    return str(len(seen)).encode()
"""
    op_catalog.push_module(client.transport, "counting", counting)
    trials = op_catalog.try_ops(client.transport, [{"op": "counting/remember"}], samples, results=True)
    assert [trial.repeats for trial in trials.results] == [False, False, False]
    with pytest.raises(NotFoundError):
        op_catalog.try_ops(client.transport, chain, ["s3://photos/none.jpg"])
    with pytest.raises(MeshError, match="samples"):
        op_catalog.try_ops(client.transport, chain, samples * 30)


@pytest.mark.usefixtures("signed", "pushed")
def test_a_module_brings_its_wheels(
    daemon: Daemon, client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel, file = tmp_path / "gear-1.0-py3-none-any.whl", tmp_path / "geared.py"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("gear/__init__.py", "def turned(pixels):\n    return pixels[::-1, ::-1].copy()\n")
    lines = ["from gear import turned", "from meshsdk.userops import image, op", ""]
    lines += ["@op(input=image('h', 'w', 3), output=image('h', 'w', 3))", "def turn(pixels):"]
    file.write_text("\n".join([*lines, "    return turned(pixels)"]))
    push = ["op", "push", str(file), "--endpoint-url", daemon.endpoint]
    assert run(push) != 0
    assert "mesh op push --wheel" in capsys.readouterr().err
    assert run([*push, "--wheel", str(tmp_path / "gear-1.0-cp311-cp311-linux_x86_64.whl")]) != 0
    assert run([*push, "--wheel", str(wheel)]) == 0
    plain, turned = (dataset(client).map(ops.decode("image")), ops.user("geared/turn", "image"))
    assert np.array_equal(plain.map(turned)[1]["image"], plain[1]["image"][::-1, ::-1])
    first = op_catalog.list_modules(client.transport)[0].version
    archive_bytes = wheel.read_bytes()
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("gear/more.py", "")
    pushed = op_catalog.push_module(
        client.transport, "geared", file.read_bytes(), wheels={wheel.name: wheel.read_bytes()}
    )
    assert pushed.version != first  # a build is its source and its wheels
    again = op_catalog.push_module(
        client.transport, "geared", file.read_bytes(), wheels={wheel.name: archive_bytes}
    )
    assert (again.version, again.new) == (first, True)


@pytest.mark.usefixtures("signed")
def test_the_command_pushes_tries_lists_and_removes(
    daemon: Daemon, client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "handy.py"
    file.write_bytes(SOURCE)
    where = ["--endpoint-url", daemon.endpoint]

    def mesh(*arguments: str) -> tuple[int, str]:
        code = run(["op", *arguments, *where])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    samples = ["s3://photos/train/", "--limit", "3"]
    code, said = mesh("test", str(file), "--op", "brighten", "--before", "decode", *samples)
    assert (code, "3 of 3 correct" in said) == (0, True)
    code, said = mesh("ls", "handy")  # a draft has no name
    assert (code, "no op matches 'handy'" in said, "handy/" in said) == (0, True, False)
    code, said = mesh("push", str(file))
    assert code == 0
    assert "handy/patch" in said
    code, said = mesh("show", "handy/patch")
    assert "A random square." in said
    bad = sizes()[1]
    code, said = mesh("test", "handy/trap", "--arg", f"on=[{bad}]", "--arg", 'how="raise"', *samples)
    assert code == 1
    assert "RuntimeError: no good" in said
    assert "2 of 3" in said
    code, said = mesh("test", "handy/patch", "--before", "decode", "--save", str(tmp_path / "out"), *samples)
    assert code == 0
    assert len(list((tmp_path / "out").glob("*.npy"))) == 3
    code, said = mesh("test", str(file), "s3://photos/train/")
    assert (code, "choose one with --op" in said) == (2, True)
    code, said = mesh("modules", "--json")
    (build,) = [json.loads(line) for line in said.splitlines()]
    assert build["state"] == "latest"
    assert mesh("rm", "handy")[0] == 0
    code, said = mesh("rm", "handy")
    assert (code, "there is no module 'handy'" in said) == (3, True)
