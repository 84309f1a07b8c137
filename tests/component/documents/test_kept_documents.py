"""Plans and snapshots that are kept: listed, removed by hand, looked at, and who may."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

import meshsdk
from meshsdk.admin.documents import list_documents, remove_document, show_document
from meshsdk.admin.views import batches_view, create_view
from meshsdk.cli.bad_samples import bad as bad_group
from meshsdk.cli.cluster import cluster
from meshsdk.cli.documents import plans as plan_group
from meshsdk.cli.documents import snapshots as snapshot_group
from meshsdk.errors import AccessError, NotFoundError, ServerError
from tests.support.archive_files import tar_of
from tests.support.daemons import Daemon
from tests.support.plan_fixtures import fill, make

if TYPE_CHECKING:
    from collections.abc import Iterator

    from click.testing import Result

    from meshsdk.client.s3_client import Client


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon.start() as found:
        fill(found)
        yield found


@pytest.fixture
def root(daemon: Daemon) -> Iterator[Client]:
    with meshsdk.connect(
        daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key
    ) as client:
        yield client


def invoke(daemon: Daemon, group: Any, *words: str, keys: tuple[str, str] | None = None) -> Result:
    access_key, secret_key = keys or (daemon.access_key, daemon.secret_key)
    env = {
        "MESH_ENDPOINT": daemon.endpoint,
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": secret_key,
    }
    done = CliRunner().invoke(group, words, env=env, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


def run(daemon: Daemon, group: Any, *words: str) -> str:
    return invoke(daemon, group, *words).output


def test_the_command_lists_shows_and_removes(daemon: Daemon) -> None:
    snapshot, plan = make(daemon, seed=11)
    (line,) = [line for line in run(daemon, plan_group, "ls").splitlines() if line.startswith(plan[:16])]
    assert "goes 2" in line
    assert f"texts of {snapshot[:16]}" in line
    (line,) = [
        line for line in run(daemon, snapshot_group, "ls").splitlines() if line.startswith(snapshot[:16])
    ]
    assert "s3://texts/a/" in line
    assert "stays" in line
    assert "kept by plan" in line
    shown = run(daemon, snapshot_group, "show", snapshot[:10])
    assert f"kept by  plan {plan}" in shown
    assert re.search(r"^stored: \d+ snapshots?, \d+ plans? \(", run(daemon, cluster, "status"), re.MULTILINE)
    assert f"removed plan {plan}" in run(daemon, plan_group, "rm", plan[:12], "--force")
    assert plan[:16] not in run(daemon, plan_group, "ls")
    assert make(daemon, seed=11) == (snapshot, plan)
    assert plan[:16] in run(daemon, plan_group, "ls")


def tar_of_lines(data: bytes) -> bytes:
    return tar_of({f"{number:09}.txt": line for number, line in enumerate(data.splitlines(), 1)})


@pytest.mark.parametrize(("kind", "ending"), [("lines", "txt"), ("tar", "tar")])
def test_the_pages_of_snapshots_are_shown_and_compared(
    daemon: Daemon, root: Client, kind: Any, ending: str
) -> None:
    bucket = f"paged-{kind}"

    def pin(**files: bytes | None) -> meshsdk.Dataset:
        for name, data in files.items():
            key = f"{name}.{ending}"
            if data is None:
                client.delete_object(Bucket=bucket, Key=key)
            else:
                body = data if kind == "lines" else tar_of_lines(data)
                client.put_object(Bucket=bucket, Key=key, Body=body)
        return meshsdk.open(f"s3://{bucket}", {"text": "txt"}, kind=kind, client=root)

    client = daemon.client()
    client.create_bucket(Bucket=bucket)
    first = pin(a=b"one\ntwo\n", b=b"three", c=b"four\n" * 500)
    second = pin(a=None, b=b"other\nlines", d=b"new")
    hashes = first.snapshot.hash, second.snapshot.hash
    shown = run(daemon, snapshot_group, "show", hashes[0][:12])
    assert "3 pages" in shown
    assert re.search(
        rf" 500 samples  2.0 KiB  page [0-9a-f]{{16}}  s3://{bucket}/c\.{ending}", re.sub("  +", "  ", shown)
    )
    told = json.loads(run(daemon, snapshot_group, "diff", *hashes, "--json"))
    changed = [[each["url"] for each in told[name]] for name in ("added", "removed")]
    assert changed == [[f"s3://{bucket}/d.{ending}"], [f"s3://{bucket}/a.{ending}"]]
    assert [new["samples"] for _, new in told["replaced"]] == [2]
    assert (told["same"], told["samples"]) == (1, 0)
    pages = json.loads(run(daemon, snapshot_group, "show", hashes[1], "--json"))["pages"]
    assert (
        pages[1]["page"]
        == json.loads(run(daemon, snapshot_group, "show", hashes[0], "--json"))["pages"][2]["page"]
    )
    assert run(daemon, snapshot_group, "diff", *hashes).endswith("1 replaced, 1 the same; +0 samples\n")
    manifest = second.manifest()
    assert manifest.hash == hashes[1]
    assert manifest.sample_name(502) == f"d.{ending}/000000001"
    assert [bytes(row["text"]) for row in second.head(3)] == [b"other", b"lines", b"four"]
    assert second.stats().bytes == second.snapshot.bytes == manifest.total_bytes == 2013
    opened = meshsdk.open(f"s3://{bucket}", snapshot=hashes[1], client=root).snapshot
    assert (opened.hash, opened.samples) == (hashes[1], 503)
    lines = meshsdk.open(f"s3://{bucket}", snapshot=hashes[1], client=root).filter("index == 502")
    assert (len(lines), bytes(lines[0]["text"])) == (1, b"new")
    missing = daemon.request("GET", f"/-/snapshots/{hashes[1]}/pages/3")
    assert (missing.status, json.loads(missing.body)["error"]["code"]) == (404, "NoSuchKey")


@pytest.mark.parametrize("kind", ["lines", "objects"])
def test_a_loop_whose_snapshot_is_removed_is_told_and_goes_on(
    daemon: Daemon, root: Client, kind: Any
) -> None:
    bucket, client = f"removed-{kind}", daemon.client()
    client.create_bucket(Bucket=bucket)
    for number in range(40):
        client.put_object(Bucket=bucket, Key=f"{number:03}.txt", Body=b"line %d" % number)

    def opened() -> meshsdk.Dataset:
        return meshsdk.open(f"s3://{bucket}", {"text": "txt"}, kind=kind, client=root)

    def loader() -> meshsdk.Loader:
        return meshsdk.Loader(opened(), 2, seed=3, shuffle=True, prefetch_bytes=1)

    def rows(batches: Any) -> list[bytes]:
        return [bytes(text) for batch in batches for text in batch["text"]]

    with loader() as whole:
        expected = rows(whole)
    with loader() as reading:
        batches = iter(reading)
        assert rows(next(batches) for _ in range(3)) == expected[:6]
        state = reading.state_dict()
        remove_document(root.transport, "plans", reading.plan.hash, force=True)
        remove_document(root.transport, "snapshots", opened().snapshot.hash, force=True)
        with pytest.raises(NotFoundError, match=r"was deleted|was removed"):
            rows(batches)
    with loader() as again:
        again.load_state_dict(state)
        assert rows(again) == expected[6:]


def test_the_earlier_path_answers_the_same_and_says_that_it_is_deprecated(daemon: Daemon) -> None:
    _, plan = make(daemon, seed=15)
    for path, status in ((f"plans/{plan}", 200), ("plans?limit=1000", 200), ("boxes", 404)):
        new, old = (daemon.request("GET", f"/-/{prefix}/{path}") for prefix in ("documents", "kept"))
        assert (new.status, old.status) == (status, status)
        assert status == 404 or json.loads(new.body) == json.loads(old.body)
        assert "deprecation" not in new.headers
        assert re.fullmatch(r"@\d{10}", old.headers["deprecation"])
        link = f'</-/documents/{path.partition("?")[0]}>; rel="successor-version"'
        assert old.headers["link"] == link
    gone = daemon.request("DELETE", f"/-/kept/plans/{plan}?force=1")
    assert (gone.status, json.loads(gone.body)["removed"]) == (200, plan)
    assert "deprecation" in gone.headers


def test_where_nothing_is_kept_that_is_told(daemon: Daemon) -> None:
    daemon.request("POST", "/-/admin/users", b'{"user_id": "none"}')
    key = json.loads(daemon.request("POST", "/-/admin/keys", b'{"user_id": "none"}').body)
    none = (key["access_key"], key["secret_key"])

    def told(group: Any, *words: str, keys: tuple[str, str] | None = none) -> str:
        done = invoke(daemon, group, *words, keys=keys)
        assert not done.stdout
        return done.stderr

    assert "no plans yet: a loader creates one" in told(plan_group, "ls")
    assert "no snapshots yet" in told(snapshot_group, "ls")
    assert not told(plan_group, "ls", "--json")
    _, plan = make(daemon, seed=14)
    assert "no bad samples" in told(bad_group, "ls", plan, keys=None)


def test_what_a_view_names_stays(daemon: Daemon, root: Client) -> None:
    _, plan = make(daemon, seed=12)
    create_view(root.transport, "texts", "b", batches_view(plan, 2))
    kept = show_document(root.transport, "plans", plan)
    assert (kept.kept_by, kept.expires_ms) == (("view texts--b",), None)
    with pytest.raises(ServerError, match=r"is used by view texts--b.*remove that first"):
        remove_document(root.transport, "plans", plan, force=True)
    daemon.client().delete_bucket(Bucket="texts--b")
    assert remove_document(root.transport, "plans", plan, force=True) == ()


def test_others_see_and_remove_nothing(daemon: Daemon, root: Client) -> None:
    _, plan = make(daemon, seed=13)
    daemon.request("POST", "/-/admin/users", json.dumps({"user_id": "ann"}).encode())
    key = json.loads(daemon.request("POST", "/-/admin/keys", json.dumps({"user_id": "ann"}).encode()).body)
    with meshsdk.connect(daemon.endpoint, access_key=key["access_key"], secret_key=key["secret_key"]) as ann:
        assert list(list_documents(ann.transport, "plans")) == []
        with pytest.raises(AccessError):
            show_document(ann.transport, "plans", plan)
        with pytest.raises(AccessError):
            remove_document(ann.transport, "plans", plan, force=True)
    assert show_document(root.transport, "plans", plan).nodes == 1
    with pytest.raises(NotFoundError, match="never created here"):
        show_document(root.transport, "plans", "0" * 64)
