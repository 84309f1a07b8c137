"""Users' ops on a real daemon: pushed, by whom, kept over a kill, tried and removed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import threading
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from meshsdk import ops
from meshsdk.admin import op_catalog
from meshsdk.cli import run
from meshsdk.errors import (
    AccessError,
    InvalidPlanError,
    MeshError,
    NotFoundError,
    ServerError,
)
from tests.support.bounded_wait import await_end
from tests.support.daemons import Daemon
from tests.support.s3_raw import Wire
from tests.support.userops_module import SOURCE, children_of, connect, dataset, jpeg, sizes, trap

if TYPE_CHECKING:
    from meshsdk.client.s3_client import Client


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
        confined = [pid for parent in family[1:] for pid in children_of(parent)]
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
