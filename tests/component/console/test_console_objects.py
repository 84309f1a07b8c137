"""The console's objects: long listings, versions, previews, deletion, and uploads that are cut."""

from __future__ import annotations

import gzip
import io
import os
import re
import tarfile
import wave
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zarr
from zarr.codecs import GzipCodec

from tests.support.console_browser import require_console
from tests.support.console_data import MANY

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.console_browser import Browser
    from tests.support.daemon_cluster import DaemonCluster
    from tests.support.daemons import Daemon

require_console()

PART: Final = 8 << 20
UPLOAD: Final = int(os.environ.get("MESH_TEST_UPLOAD_BYTES", "24_000_000"))
"""Bytes of the upload; by hand once 200,000,000."""


def test_long_listings_load_as_they_are_scrolled(browser: Browser) -> None:
    browser.show("/buckets/many", ".object .name button")
    assert "1,000 entries so far" in browser.page.locator("main p[role=status]").inner_text()
    browser.page.locator(".objects").evaluate("box => box.scrollTo(0, box.scrollHeight)")
    browser.page.wait_for_selector(f"text={MANY:,} entries")
    browser.page.locator(".objects").evaluate("box => box.scrollTo(0, box.scrollHeight)")
    browser.page.wait_for_selector(f"text={MANY - 1:07}")
    assert browser.page.locator(".object").count() < 80
    browser.page.fill("[name=after]", "0001000")
    browser.page.click("text=Show >> nth=-1")
    browser.page.wait_for_selector(f"text={MANY - 1001} entries")
    browser.page.wait_for_selector("button:has-text('0001001')")


def test_tags_and_versions_of_an_object(daemon: Daemon, browser: Browser) -> None:
    s3 = daemon.client()
    s3.put_bucket_versioning(Bucket="many", VersioningConfiguration={"Status": "Enabled"})
    for text in ("first", "second"):
        s3.put_object(Bucket="many", Key="0000000", Body=text.encode(), Tagging="kind=cat")
    s3.close()
    browser.show("/buckets/many", "button:has-text('0000000')")
    browser.page.click("button:has-text('0000000')")
    browser.page.click("dialog summary")
    browser.page.wait_for_selector("dialog td >> nth=8")
    assert browser.page.locator("dialog .more .tag").first.inner_text() == "kind: cat"
    assert browser.page.locator("dialog tbody tr").count() == 3
    with browser.page.expect_download() as download:
        browser.page.click("dialog tbody tr >> nth=1 >> text=Download")
    assert download.value.path().read_text() == "first"
    browser.page.keyboard.press("Escape")


def test_previews_show_what_objects_hold(daemon: Daemon, browser: Browser) -> None:
    """Arrays, sounds, tables and archives; the names and texts in them are hostile."""
    attack = "<img src=x onerror=alert(17)>"
    array, table, archive, sound = io.BytesIO(), io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.save(array, np.arange(2 * 8 * 16, dtype=np.float32).reshape(2, 8, 16))
    pq.write_table(pa.table({"text": [attack, None], "vector": [[0.5, 1.0], [2.0]]}), table)
    with tarfile.open(fileobj=archive, mode="w") as tar:
        member = tarfile.TarInfo(f"a/{attack}.txt")
        member.size = 4
        tar.addfile(member, io.BytesIO(b"text"))
    with wave.open(sound, "wb") as writer:
        writer.setparams((1, 2, 8000, 0, "NONE", ""))
        writer.writeframes(np.zeros(4000, np.int16).tobytes())
    values = np.random.default_rng(1).normal(size=(4, 16, 24)).astype(np.float32)
    values[:2, 4:8, 8:16] = 0  # chunks of the fill value, which zarr-python does not store
    stored: dict[str, Any] = {}
    group = zarr.open_group(zarr.storage.MemoryStore(stored), mode="w", zarr_format=3)
    for name, shards in {"z": None, "shards": (2, 16, 24)}.items():
        made = group.create_array(
            name, shape=values.shape, dtype="f4", chunks=(1, 4, 8), shards=shards, compressors=[GzipCodec()]
        )
        made[:] = values
    group = zarr.open_group(zarr.storage.MemoryStore(stored), path="old", mode="w", zarr_format=2)
    for name, separator, order in ("0", "/", "C"), ("columns", ".", "F"):
        keys = {"name": "v2", "separator": separator}
        made = group.create_array(
            name, shape=(4, 16, 24), dtype=">f4", chunks=(1, 4, 8), order=order, chunk_key_encoding=keys
        )
        made[:] = values
    shown = "old/0/.zarray", "old/columns/.zarray", "old/0/1/0/0", "old/columns/1.0.0"  # a screen has few
    for name, chunk in stored.items():
        if name.startswith("old/") and name not in shown:
            continue
        daemon.request("PUT", f"/private/shown/{name}", chunk.to_bytes())
    whole = stored["shards/c/1/0/0"].to_bytes()
    daemon.request("PUT", "/private/shown/z/c/0/0/0", gzip.compress(values[0, :2, :8].tobytes()))
    daemon.request("PUT", "/private/shown/shards/c/1/0/0", whole[:8] + bytes(8) + whole[16:])
    plane = io.BytesIO()
    np.save(plane, values[:2])
    found = {"array.npy": array, "plane.npy": plane, "rows.parquet": table, "files.tar": archive}
    for name, data in {**found, "sound.bin": sound}.items():
        daemon.request("PUT", f"/private/shown/{name}", data.getvalue())
    page = browser.page
    expected = {
        "array.npy": ("dialog canvas", "<f4[2×8×16]. The first plane is shown."),
        "rows.parquet": ("dialog td", f"{attack}\t[0.5, 1.0]\nnull\t[2.0]"),
        "files.tar": ("dialog .sheet a", f"a/{attack}.txt\t4 B"),
        "sound.bin": ("dialog audio", "WAV 0.5 s"),
        "old/0/1/0/0": ("dialog canvas", "<f4[1×4×8]."),
        "old/columns/1.0.0": ("dialog canvas", "<f4[1×4×8]."),
        "z/c/1/0/0": ("dialog canvas", "<f4[1×4×8]."),
        "plane.npy": ("dialog canvas", "<f4[2×16×24]. The first plane is shown."),
        "shards/c/0/0/0": (
            "dialog canvas",
            "A shard of 2 × 4 × 3 chunks of 1 × 4 × 8, of which 22 are stored.",
        ),
    }
    pictures = []
    for name, (selector, text) in expected.items():
        browser.show("/buckets/private?prefix=shown%2F&flat=1", f"button:has-text('{name}')")
        page.click(f"button:has-text('{name}')")
        page.wait_for_selector(selector)
        page.get_by_text(text.partition("\t")[0]).first.wait_for()
        assert text in page.locator("dialog .preview").first.inner_text()
        browser.screenshot(f"preview-{name.replace('/', '-')}")
        if selector == "dialog canvas":
            pictures.append(page.locator(selector).evaluate("canvas => canvas.toDataURL()"))
        if name == "files.tar":
            with page.expect_download() as download:
                page.click("dialog .sheet a")
            assert download.value.path().read_text() == "text"
        page.keyboard.press("Escape")
        page.wait_for_selector("dialog", state="detached")

    assert pictures[-1] == pictures[-2]  # the shard's first plane is that of the array
    assert (
        pictures[1] == pictures[2] == pictures[3]
    )  # chunks of Zarr version 2 in either order, and of version 3
    for name, why in {"z/c/0/0/0": "a chunk of 64 bytes", "shards/c/1/0/0": "not gzip"}.items():
        page.click(f"button:has-text('{name}')")
        page.wait_for_selector(f"text=/This chunk of shown/.* cannot be shown: .*{why}/")
        page.keyboard.press("Escape")


def test_a_deletion_says_what_it_would_delete_first(daemon: Daemon, browser: Browser) -> None:
    for name in ("old/a", "old/b", "kept"):
        daemon.request("PUT", f"/private/gone/{name}", b"12345")
    browser.show("/buckets/private?prefix=gone%2F", "text=old/")
    browser.page.check("[aria-label='Select gone/old/']")
    browser.page.click("button:has-text('Delete (1)')")
    browser.page.wait_for_selector("dialog >> text=This deletes 2 objects from s3://private, 10 B")
    assert daemon.request("GET", "/private/gone/old/a").status == 200
    browser.page.click("dialog >> button:has-text('Delete 2 objects')")
    browser.page.wait_for_selector("text=2 of 2 deleted")
    browser.page.click("dialog >> button:has-text('Close') >> nth=-1")
    assert daemon.request("GET", "/private/gone/old/b").status == 404
    assert daemon.request("GET", "/private/gone/kept").status == 200


def parts_in(urls: list[str]) -> list[int]:
    return sorted(int(re.findall(r"partNumber=(\d+)", url)[0]) for url in urls)


def test_an_upload_goes_on_after_a_cut(nodes: DaemonCluster, browser: Browser, tmp_path: Path) -> None:
    with closing(nodes["n1"].client()) as s3:
        s3.create_bucket(Bucket="uploads")
    data = np.random.default_rng(1).bytes(UPLOAD)
    count = -(-UPLOAD // PART)
    (tmp_path / "large.bin").write_bytes(data)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "small.json").write_text('{"a": [1, 2]}')
    closed = browser.context.new_page()
    arrived: list[str] = []

    def note(request: Any) -> None:
        if "partNumber=" in request.url:
            arrived.append(request.url)

    closed.on("requestfinished", note)
    # It never arrives: a request that was only held back would be sent as the page closes.
    closed.route("**/*partNumber=2&*", lambda route: route.abort())
    closed.goto(f"{nodes['n1'].endpoint}/-/console/#/buckets/uploads")
    closed.set_input_files("input[type=file]", tmp_path / "large.bin")
    for _ in range(1500):
        if len(arrived) >= min(count - 1, 12):
            break
        closed.wait_for_timeout(20)
    closed.close()
    before = parts_in(arrived)
    assert 2 not in before
    sent: list[str] = []

    def cut_once(route: Any) -> None:
        sent.append(route.request.url)
        if len(sent) == 1:
            route.abort()
        else:
            route.continue_()

    browser.page.route("**/*partNumber=*", cut_once)
    browser.show("/buckets/uploads", "text=No objects here")
    dropped = [str(tmp_path / name) for name in ("large.bin", "folder")]
    debugger = browser.context.new_cdp_session(browser.page)
    for kind in ("dragEnter", "dragOver", "drop"):
        held = {"items": [], "files": dropped, "dragOperationsMask": 1}
        debugger.send("Input.dispatchDragEvent", {"type": kind, "x": 640, "y": 500, "data": held})
    browser.page.wait_for_selector("text=2 of 2 done")
    browser.page.unroute("**/*partNumber=*")
    left = [number for number in range(1, count + 1) if number not in before]
    assert set(left) >= set(parts_in(sent))
    assert len(sent) == len(set(parts_in(sent))) + 1
    with closing(nodes["n3"].client()) as s3:
        assert s3.get_object(Bucket="uploads", Key="large.bin")["Body"].read() == data
        assert s3.head_object(Bucket="uploads", Key="folder/small.json")["ContentLength"] == 13
