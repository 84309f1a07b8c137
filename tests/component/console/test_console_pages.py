"""The console in a real browser: what a person sees and does, and what nobody can make it do."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
import tarfile
import wave
import zipfile
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import jsonschema
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from openapi_spec_validator import validate
from PIL import Image

import meshsdk as mesh
from meshdemo.photographs import photographs
from meshsdk import meters, ops
from meshsdk.client.request import Request
from meshwire.http_values.mesh_headers import LOADER_REPORT_HEADER
from tests.support.bounded_wait import await_true
from tests.support.console_browser import open_browser, require_console, running_chromium
from tests.support.console_client import ConsoleClient
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.console_browser import Browser

require_console()

BATCH: Final = 8
SIZE: Final = 96
MANY: Final = 1300
ATTACKS: Final = (
    "<img src=x onerror=alert(1)>",
    "<script>alert(2)</script>",
    '"><svg onload=alert(3)>',
    "javascript:alert(4)",
    "'-alert(5)-'",
    "{{constructor.constructor('alert(6)')()}}",
    "</title><script>alert(7)</script>",
    "%3Cscript%3Ealert(8)%3C%2Fscript%3E",
    "&lt;script&gt;alert(9)&lt;/script&gt;",
    "\u202e<b onmouseover=alert(10)>",
)
TRICKS: Final = (
    "<img src=x onerror=alert({0})>",
    "<svg><animate onbegin=alert({0}) attributeName=x dur=1s>",
    "<iframe srcdoc='<script>parent.alert({0})</script>'></iframe>",
    "</textarea><details open ontoggle=alert({0})>",
    '"><input autofocus onfocus=alert({0}) a="',
)
BROKEN: Final = "<img src=x onerror=alert(16)>"
DOCUMENTS: Final = {
    "page.html": (b"<html><script>parent.alert(11);alert(11)</script></html>", "text/html"),
    "drawing.svg": (
        b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(12)'><script>alert(12)</script></svg>",
        "image/svg+xml",
    ),
    "picture.png": (b"<script>alert(13)</script>", "image/png"),
    "data.json": (b'{"a": "<img src=x onerror=alert(14)>"}', "text/html"),
}


def png(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (24, 32, 3), np.uint8)
    pixels[:, : 8 * (seed % 4)] //= 3
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    audit = tmp_path_factory.mktemp("audit") / "audit.log"
    more = ["--audit-log", str(audit), "--console-grafana", "http://127.0.0.1:1/grafana"]
    with Daemon.start(args=["--console", "on", "--durability", "relaxed", *more]) as running:
        s3 = running.client()
        for bucket in ("photos", "many", "hostile", "private"):
            s3.create_bucket(Bucket=bucket)
        for photograph in photographs(32):
            s3.put_object(Bucket="photos", Key=f"train/{photograph.name}", Body=photograph.jpeg)
        for number, attack in enumerate(ATTACKS):
            text = f"{attack}/{attack}.txt" if number % 2 else f"{attack}.txt"
            s3.put_object(Bucket="hostile", Key=f"keys/{text}", Body=attack.encode(), ContentType="text/html")
            s3.put_object(
                Bucket="hostile", Key=f"classes/{attack.replace('/', '')}/{number}.png", Body=png(number)
            )
        s3.put_object(Bucket="hostile", Key=f"classes/{BROKEN}/broken.png", Body=b"no picture")
        for name, (body, kind) in DOCUMENTS.items():
            s3.put_object(
                Bucket="hostile",
                Key=f"documents/{name}",
                Body=body,
                ContentType=kind,
                Metadata={"note": "<img src=x onerror=alert(15)>"},
            )
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: s3.put_object(Bucket="many", Key=f"{n:07}", Body=b""), range(MANY)))
        s3.close()
        yield running
        assert "Traceback" not in running.output()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with running_chromium() as running:
        yield running


@pytest.fixture(scope="module")
def browser(chromium: Any, daemon: Daemon) -> Iterator[Browser]:
    with open_browser(
        chromium, daemon, viewport={"width": 1280, "height": 900}, accept_downloads=True
    ) as opened:
        opened.sign_in(daemon.access_key, daemon.secret_key)
        yield opened


def loader_of(daemon: Daemon, source: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> mesh.Loader:
    monkeypatch.setenv("MESH_ENDPOINT", daemon.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", daemon.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", daemon.secret_key)
    found = mesh.open(source, fields={"image": ["jpg", "png"], "label": "@class"})
    found = found.map(
        ops.decode("image"), ops.random_resized_crop("image", SIZE), ops.hflip("image"), ops.to_chw("image")
    )
    return mesh.Loader(found, global_batch=BATCH, seed=7, output="numpy", **options)


TOO_WIDE: Final = """() => [
    ...(document.documentElement.scrollWidth > innerWidth ? ["the page"] : []),
    ...[...document.querySelectorAll("main *")]
        .filter((each) => /auto|scroll/.test(getComputedStyle(each).overflowX))
        .filter((each) => each.scrollWidth > each.clientWidth + 1)
        .map((each) => `what scrolls: ${each.outerHTML.slice(0, 100)}`),
    ...[...document.querySelectorAll("main td, main dd, main li")]
        .map((each) => [each, each.clientWidth - 2 * parseFloat(getComputedStyle(each).paddingLeft)])
        .filter(([each, width]) => each.clientWidth && width < Math.min(64, 6 * each.innerText.length))
        .map(([each, width]) => `${width} px: ${each.outerHTML.slice(0, 100)}`),
]"""
"""What scrolls sideways, and cells whose words would break letter by letter."""
PAGES: Final = {
    "overview": ("/overview", "section[aria-label=Capacity] >> text=disks"),
    "buckets": ("/buckets", "table"),
    "objects": ("/buckets/photos?prefix=train%2F&flat=1", ".object .name button"),
    "datasets": ("/datasets", "table a"),
    "plans": ("/batches", "table a"),
    "views": ("/views", "h1"),
    "ops": ("/ops", "section[aria-label=Library] td"),
    "jobs": ("/jobs", "h2"),
    "users": ("/users", "section.user"),
    "audit": ("/audit", "td"),
}
LOOKS: Final = {
    "light": {"color_scheme": "light", "viewport": {"width": 1280, "height": 900}},
    "dark-phone": {"color_scheme": "dark", "viewport": {"width": 390, "height": 844}},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("look", LOOKS)
def test_every_page_is_there_and_accessible(
    daemon: Daemon, chromium: Any, look: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loader_of(daemon, "s3://photos/train", monkeypatch) as loader:
        plan = loader.plan.hash
    snapshot = json.loads(daemon.request("GET", f"/-/plans/{plan}").body)["snapshot"]
    pages = {
        **PAGES,
        "dataset": (f"/datasets/{snapshot}", ".bars >> nth=1"),
        "batch": (f"/batches/{plan}?batch=24", "ol.rows canvas"),
    }
    with open_browser(chromium, daemon, bypass_csp=True, **LOOKS[look]) as browser:
        browser.page.goto(f"{daemon.endpoint}/console")
        browser.page.wait_for_selector("form")
        found = {"sign-in": browser.violations()}
        browser.sign_in(daemon.access_key, daemon.secret_key)
        for name, (address, selector) in pages.items():
            browser.show(address, selector)
            browser.screenshot(f"{name}-{look}")
            found[name] = browser.violations()
            assert browser.page.evaluate(TOO_WIDE) == [], f"{name} does not fit"
        browser.page.click("details.plan summary")
        browser.page.wait_for_selector("details.plan .ops")
        found["plan"] = browser.violations()
        browser.page.click("details.plan summary")
        browser.page.click("ol.rows button")
        browser.page.wait_for_selector("dialog .pair canvas")
        browser.page.wait_for_selector("dialog .marked polygon >> nth=1")
        browser.screenshot(f"row-{look}")
        found["row"] = browser.violations()
    assert {name: each for name, each in found.items() if each} == {}


def test_the_schema_of_the_native_api_says_what_the_node_answers(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loader_of(daemon, "s3://photos/train", monkeypatch) as loader:
        plan = loader.plan.hash
    document = json.loads(ConsoleClient.of(daemon).send("GET", "/-/openapi.json").body)
    validate(document)
    snapshot = json.loads(daemon.request("GET", f"/-/plans/{plan}").body)["snapshot"]
    known = {
        "plan": plan,
        "snapshot": snapshot,
        "epoch": "0",
        "step": "0",
        "bucket": "photos",
        "op": "resize",
    }
    operations = [
        (path, method.upper(), said)
        for path, each in document["paths"].items()
        for method, said in each.items()
    ]
    assert len(operations) > 70
    checked = 0
    for path, method, said in operations:
        assert "{rest}" not in path, "a handler has no description: @operation"
        target = re.sub(r"\{(\w+)\}", lambda found: known.get(found[1], "absent"), path)
        if method == "DELETE":
            target = target.replace(plan, "0" * 64).replace(snapshot, "0" * 64)
        answer = daemon.request(method, target, b"" if method in ("GET", "DELETE") else b"?")
        text = answer.body.decode(errors="replace").lower()
        assert "there is nothing at" not in text, f"no route answers {method} {path}"
        assert answer.status not in (405, 500), f"{method} {path}: {text}"
        shape = said["responses"].get("200", {}).get("content", {}).get("application/json", {}).get("schema")
        if method == "GET" and shape and answer.status == 200:
            schema = {**shape, "components": document["components"]}
            jsonschema.validate(json.loads(answer.body), schema)
            checked += 1
        for parameter in said["parameters"]:
            if method == "GET" and parameter["in"] == "query":
                told = daemon.request("GET", f"{target}?{parameter['name']}=1").body.decode(errors="replace")
                assert "unknown query parameter" not in told, f"{path} does not know {parameter['name']}"
    assert checked > 15


def test_batches_are_those_that_a_rank_gets(
    daemon: Daemon, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loader_of(daemon, "s3://photos/train", monkeypatch, rank=1, world=2) as loader:
        batches = [loader.at(step) for step in range(2)]
        plan = loader.plan.hash
    s3 = daemon.client()
    folders = s3.list_objects_v2(Bucket="photos", Prefix="train/", Delimiter="/")["CommonPrefixes"]
    s3.close()
    classes = [folder["Prefix"].split("/")[1] for folder in folders]
    browser.show(f"/batches/{plan}?rank=1&world=2&batch={BATCH}", "[data-batch] canvas")
    for step, batch in enumerate(batches):
        if step:
            browser.page.keyboard.press("ArrowRight")
        browser.page.wait_for_selector(f"[data-batch*='\"step\":{step},'] canvas")
        shown = browser.page.evaluate(
            """() => [...document.querySelectorAll("ol.rows canvas")].map((canvas) =>
                 [...canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data])"""
        )
        pixels = np.array(shown, np.uint8).reshape(BATCH // 2, SIZE, SIZE, 4)[..., :3].transpose(0, 3, 1, 2)
        assert np.array_equal(pixels, np.asarray(batch["image"]))
        names = browser.page.locator(".row-name").all_inner_texts()
        labels = [classes[int(label)] for label in batch["label"]]
        assert [name.split("/")[1] for name in names] == labels
    browser.page.click("ol.rows button >> nth=0")
    source = browser.page.locator("dialog .field a").first.inner_text()
    assert source == f"s3://photos/{names[0]}.jpg"
    told = browser.page.locator("[aria-label='What the ops drew for image'] li")
    told.first.wait_for()
    drawn = told.all_inner_texts()
    assert re.fullmatch(r"random_resized_crop took .* pixels from .*, scaled to 96 × 96", drawn[0])
    assert drawn[1] in ("hflip left it as it was", "hflip swapped left and right")
    part = browser.page.locator("dialog .marked .part").get_attribute("data-part")
    assert np.array_equal(np.array(json.loads(part or "")), drawn_corners(daemon, plan, step, 0))
    browser.page.keyboard.press("Escape")
    browser.page.wait_for_selector("dialog", state="detached")
    browser.page.keyboard.press("Shift+ArrowRight")
    browser.page.wait_for_selector("[data-batch*='\"epoch\":1,']")
    browser.page.click("text=Side by side")
    browser.page.wait_for_selector("section[aria-label='Second batch'] canvas")


def test_a_loop_is_as_far_as_what_it_has_received(
    daemon: Daemon, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loader has the whole epoch at once."""
    monkeypatch.setattr(meters, "_EVERY", 0.0)

    def told(name: str = "far-ahead") -> dict[str, float]:
        (node,) = json.loads(daemon.request("GET", "/-/activity").body)["nodes"].values()
        found: dict[str, float] = node["loaders"].get(name, {})
        return found

    with loader_of(daemon, "s3://photos/train", monkeypatch, report="far-ahead") as loader:
        steps = len(loader)
        batches = iter(loader)
        next(batches)
        await_true(lambda: sum(loader.stats().frames.values()) == steps)
        next(batches)  # nothing is left to request: its own request tells
        await_true(lambda: told().get("epochs", 0) > 0)
        assert 0 < told()["epochs"] <= 2 / steps < told()["epochs_requested"] == 1
        browser.show("/jobs", "article[aria-label='Loop far-ahead'] .meter")
        browser.screenshot("loop-ahead")
        shown = browser.page.locator("article[aria-label='Loop far-ahead'] .meter").inner_text()
        assert re.search(r"Epoch 0 (25|50).% of 32 samples, (75|50).% prefetched", shown), shown
        earlier = {LOADER_REPORT_HEADER: "name=earlier;samples=8;waited=0.000;seconds=1.000"}  # no position
        asked = Request("GET", f"/-/plans/{loader.plan.hash}/0/2", f"batch={BATCH}", earlier)
        loader.dataset.client.transport.call(asked, lambda response: response.read(), 60)
        await_true(lambda: told("earlier"))
        assert told("earlier")["epochs"] == 2 / steps
        browser.page.wait_for_selector(
            "article[aria-label='Loop far-ahead'] >> text=On s3://photos: decode → "
        )
        facts = browser.page.locator("article[aria-label='Loop far-ahead'] dl").inner_text()
        assert browser.violations() == []
        assert re.search(r"Processor\s+[0-9.]+ ms a sample\s+Reading\s+[0-9.]+ ms a sample", facts), facts
        assert re.search(r"Shared batches\s+[0-9.]+.%", facts), facts


def drawn_corners(daemon: Daemon, plan: str, step: int, row: int) -> Any:
    """Where the corners of the row's picture lie in its source, as the node says."""
    answer = daemon.request("GET", f"/-/plans/{plan}/0/{step}/draws?rank=1&world=2&batch={BATCH}&row={row}")
    return json.loads(answer.body)["images"]["image"]["corners"]


def test_long_listings_load_as_they_are_scrolled(browser: Browser) -> None:
    browser.show("/buckets/many", ".object .name button")
    assert "1,000 names so far" in browser.page.locator("main p[role=status]").inner_text()
    browser.page.locator(".objects").evaluate("box => box.scrollTo(0, box.scrollHeight)")
    browser.page.wait_for_selector(f"text={MANY:,} names")
    browser.page.locator(".objects").evaluate("box => box.scrollTo(0, box.scrollHeight)")
    browser.page.wait_for_selector(f"text={MANY - 1:07}")
    assert browser.page.locator(".object").count() < 80
    browser.page.fill("[name=after]", "0001200")
    browser.page.click("text=Show >> nth=-1")
    browser.page.wait_for_selector("text=99 names")
    browser.page.wait_for_selector("button:has-text('0001201')")


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
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "gzip", "configuration": {}}]
    grid = {"name": "regular", "configuration": {"chunk_shape": [4, 16]}}
    zarr = {"zarr_format": 3, "node_type": "array", "shape": [8, 16], "data_type": "float32", "fill_value": 0,
            "chunk_grid": grid, "chunk_key_encoding": {"name": "default"}, "codecs": codecs}  # fmt: skip
    rows = np.arange(64, dtype="<f4")
    daemon.request("PUT", "/private/shown/z/zarr.json", json.dumps(zarr).encode())
    daemon.request("PUT", "/private/shown/z/c/1/0", gzip.compress(rows.tobytes()))
    daemon.request("PUT", "/private/shown/z/c/0/0", gzip.compress(rows[:9].tobytes()))
    found = {"array.npy": array, "rows.parquet": table, "files.tar": archive, "sound.bin": sound}
    for name, data in found.items():
        daemon.request("PUT", f"/private/shown/{name}", data.getvalue())
    page = browser.page
    expected = {
        "array.npy": ("dialog canvas", "<f4[2×8×16]. The first of its planes is shown."),
        "rows.parquet": ("dialog td", f"{attack}\t[0.5, 1.0]\nnull\t[2.0]"),
        "files.tar": ("dialog .sheet a", f"a/{attack}.txt\t4 B"),
        "sound.bin": ("dialog audio", "WAV 0.5 s"),
        "z/c/1/0": ("dialog canvas", "<f4[4×16]."),
    }
    for name, (selector, text) in expected.items():
        browser.show("/buckets/private?prefix=shown%2F&flat=1", f"button:has-text('{name}')")
        page.click(f"button:has-text('{name}')")
        page.wait_for_selector(selector)
        page.get_by_text(text.partition("\t")[0]).first.wait_for()
        assert text in page.locator("dialog .preview").first.inner_text()
        browser.screenshot(f"preview-{name.replace('/', '-')}")
        if name == "files.tar":
            with page.expect_download() as download:
                page.click("dialog .sheet a")
            assert download.value.path().read_text() == "text"
        page.keyboard.press("Escape")
        page.wait_for_selector("dialog", state="detached")

    page.click("button:has-text('z/c/0/0')")
    page.wait_for_selector("text=/This chunk of shown/z/ cannot be shown: .*a chunk of 36 bytes/")
    page.keyboard.press("Escape")


def test_settings_policies_and_the_audit_log_in_words(daemon: Daemon, browser: Browser) -> None:
    attack = "<img src=x onerror=alert(18)>"
    s3 = daemon.client()
    statement = {
        "Sid": "x",
        "Effect": "Allow",
        "Principal": "*",
        "Action": ["s3:GetObject", "s3:ListBucket"],
        "Resource": ["arn:aws:s3:::photos", f"arn:aws:s3:::photos/{attack}*"],
        "Condition": {"IpAddress": {"aws:SourceIp": "10.0.0.0/8"}},
    }
    absent_keys_pass = {
        "BoolIfExists": {"aws:SecureTransport": "true"},
        "Null": {"s3:prefix": "false"},
        "ForAllValues:StringLike": {"s3:RequestObjectTagKeys": "a*"},
    }
    more = {**statement, "Sid": "y", "Effect": "Deny", "Condition": absent_keys_pass}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement, more]})
    s3.put_bucket_policy(Bucket="photos", Policy=policy)
    s3.put_bucket_tagging(Bucket="photos", Tagging={"TagSet": [{"Key": "team", "Value": "vision"}]})
    s3.close()
    page = browser.page
    browser.show("/buckets/photos", "button:has-text('Settings')")
    page.click("button:has-text('Settings')")
    page.wait_for_selector("dialog >> text=On vm")
    words = (
        "Everybody, also without a key, may read objects and list the names, on bucket photos and "
        f"objects of photos that begin with {attack}, if the client's address is in 10.0.0.0/8."
    )
    told = page.locator("dialog .words").inner_text()
    assert words in told
    for part in (
        "the connection by TLS is true (or there is none)",
        "the prefix that is listed is there",
        "every value of s3:RequestObjectTagKeys is like a* (or there is none)",
    ):
        assert part in told
    assert page.locator("dialog .tag").last.inner_text() == "team: vision"
    browser.screenshot("settings")
    expiry = page.locator("section[aria-label='What expires']")
    assert "it has no lifecycle rules" in expiry.inner_text()
    page.fill("dialog [name=prefix]", "old & <b>/")
    page.fill("dialog [name=days]", "30")
    page.click("button:has-text('Add a rule')")
    expiry.get_by_text(
        "Objects that begin with old & <b>/ are deleted 30 days after they were stored."
    ).wait_for()
    with contextlib.closing(daemon.client()) as s3:
        rules = s3.get_bucket_lifecycle_configuration(Bucket="photos")["Rules"]
        assert [(rule["Filter"], rule["Expiration"]) for rule in rules] == [
            ({"Prefix": "old & <b>/"}, {"Days": 30})
        ]
        some = {"And": {"Prefix": "a/", "ObjectSizeLessThan": 2048}}
        versions = {"NoncurrentDays": 1, "NewerNoncurrentVersions": 3}
        rules += [
            {"ID": "v", "Status": "Disabled", "Filter": some, "NoncurrentVersionExpiration": versions},
            {"Status": "Enabled", "Filter": {}, "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 2}},
        ]
        s3.put_bucket_lifecycle_configuration(Bucket="photos", LifecycleConfiguration={"Rules": rules})
        page.keyboard.press("Escape")
        page.click("button:has-text('Settings')")
        page.wait_for_selector("[aria-label='Remove rule 3']")
        assert browser.violations() == []
        page.click("[aria-label='Remove rule 1']")
        page.wait_for_selector("[aria-label='Remove rule 3']", state="detached")
        first, second = expiry.locator("li").all_inner_texts()
        assert first.startswith(
            "off Earlier versions of objects that begin with a/, smaller than 2 KiB are removed one day "
            "after they were replaced, except the last 3. v"
        )
        assert second.startswith("Uploads of objects that do not end are given up after 2 days.")
        assert s3.get_bucket_lifecycle_configuration(Bucket="photos")["Rules"][0]["Status"] == "Disabled"
        page.click("[aria-label='Remove rule 2']")
        page.wait_for_selector("[aria-label='Remove rule 2']", state="detached")
        page.click("[aria-label='Remove rule 1']")
        expiry.get_by_text("it has no lifecycle rules").wait_for()
        with pytest.raises(s3.exceptions.ClientError, match="NoSuchLifecycleConfiguration"):
            s3.get_bucket_lifecycle_configuration(Bucket="photos")
    page.keyboard.press("Escape")
    browser.show("/audit", "td")
    page.fill("[name=wanted]", "PutBucketPolicy")
    page.click("button:has-text('Show')")
    page.wait_for_selector("tbody tr")
    assert "s3://photos/" in page.locator("tbody tr").first.inner_text()


def test_an_op_is_tried_on_an_object(daemon: Daemon, browser: Browser) -> None:
    found = json.loads(daemon.request("GET", "/-/ops").body)["ops"]
    assert len(found) > 20
    s3 = daemon.client()
    name = s3.list_objects_v2(Bucket="photos", MaxKeys=1)["Contents"][0]["Key"]
    s3.close()
    page = browser.page
    browser.show("/ops", "section[aria-label=Library] td")
    page.fill("[name=sample]", f"s3://photos/{name}")
    page.fill("[name=ops]", '[{"op": "decode"}, {"op": "resize", "args": {"size": [20, 30]}}]')
    page.click("button:has-text('Run')")
    page.wait_for_selector("[aria-label=Result] canvas")
    browser.screenshot("trial")
    canvas = page.locator("[aria-label=Result] canvas")
    assert (canvas.get_attribute("width"), canvas.get_attribute("height")) == ("30", "20")
    assert "the same the second time" in page.locator("[aria-label=Result]").inner_text()
    page.fill("[name=ops]", '[{"op": "decode"}, {"op": "<b>no such op</b>"}]')
    page.click("button:has-text('Run')")
    page.wait_for_selector(".problem:has-text('<b>no such op</b>')")


def test_a_deletion_says_what_it_would_delete_first(daemon: Daemon, browser: Browser) -> None:
    for name in ("old/a", "old/b", "kept"):
        daemon.request("PUT", f"/private/gone/{name}", b"12345")
    browser.show("/buckets/private?prefix=gone%2F", "text=old/")
    browser.page.check("[aria-label='Select gone/old/']")
    browser.page.click("button:has-text('Delete (1)')")
    browser.page.wait_for_selector("dialog >> text=This deletes 2 objects of s3://private, 10 B")
    assert daemon.request("GET", "/private/gone/old/a").status == 200
    browser.page.click("dialog >> button:has-text('Delete 2')")
    browser.page.wait_for_selector("text=2 of 2 deleted")
    browser.page.click("dialog >> button:has-text('Close') >> nth=-1")
    assert daemon.request("GET", "/private/gone/old/b").status == 404
    assert daemon.request("GET", "/private/gone/kept").status == 200


def test_nothing_that_is_stored_is_executed(
    daemon: Daemon, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loader_of(daemon, "s3://hostile/classes", monkeypatch, on_bad="mask", max_bad=1.0) as loader:
        plan = loader.plan.hash
        for _ in loader:  # a sample that cannot be decoded is noted with its name
            pass
    page = browser.page
    browser.show("/buckets/hostile?prefix=keys%2F&flat=1", ".object .name button")
    shown = page.locator(".object .name button")
    for number in range(shown.count()):
        shown.nth(number).click()
        page.wait_for_selector("dialog pre, dialog .problem")
        page.keyboard.press("Escape")
        page.wait_for_selector("dialog", state="detached")
    for name, (body, _) in DOCUMENTS.items():
        browser.show("/buckets/hostile?prefix=documents%2F", f"button:has-text('{name}')")
        page.click(f"button:has-text('{name}')")
        page.wait_for_selector("dialog pre")
        assert "onerror=alert(15)" in page.locator("dialog .facts").inner_text()
        if name != "data.json":
            assert page.locator("dialog pre").inner_text() == body.decode()
        page.keyboard.press("Escape")
    browser.show(f"/batches/{plan}?batch={len(ATTACKS)}", "ol.rows canvas")
    page.click("details.plan summary")
    page.wait_for_selector("details.plan .ops >> text=random_resized_crop")
    assert BROKEN in page.locator("details.plan td").first.inner_text()
    page.click("details.plan dd a")  # the dataset: names of classes, and what could not be used
    page.wait_for_selector("section[aria-label^='Samples that plan'] td")
    assert BROKEN in page.locator("section[aria-label^='Samples that plan'] td").first.inner_text()
    classes = page.locator("[aria-label='Samples of each class of label']").first.inner_text()
    assert BROKEN in classes
    assert ATTACKS[0] in classes
    for selector in (
        "main script",
        "main svg[onload]",
        "main [onerror]",
        "main iframe",
        "main embed",
        "main object",
    ):
        assert page.locator(selector).count() == 0
    for name in ("page.html", "drawing.svg"):  # opened by their own addresses, in an origin of their own
        address = daemon.client().generate_presigned_url(
            "get_object", {"Bucket": "hostile", "Key": f"documents/{name}"}
        )
        other = browser.context.new_page()
        other.on("dialog", lambda dialog: dialog.dismiss())
        other.goto(address)
        assert other.evaluate("self.origin") == "null"
        other.close()
    assert browser.trouble == []


def trick(number: int) -> str:
    """A text that would be executed as alert(number), if it were markup."""
    return TRICKS[number % len(TRICKS)].format(number)


USER_OP: Final = """
from meshsdk.userops import BYTES, BadSample, array, op

@op(input=BYTES, output=array("int64", ()), memory=128 << 20)
def hostile(data):
    {summary!r}
    raise BadSample({error!r})
"""


def test_texts_of_users_are_shown_as_texts(daemon: Daemon, browser: Browser) -> None:
    """Eighteen more tries: with the eighteen above, 36 of 36 do nothing."""
    page, table, archive = browser.page, io.BytesIO(), io.BytesIO()
    pq.write_table(pa.table({trick(20): [trick(21)]}), table)
    with zipfile.ZipFile(archive, "w") as writer:
        writer.writestr(f"{trick(22)}.txt", "")
    objects = {
        "columns.parquet": table.getvalue(),
        "names.zip": archive.getvalue(),
        "foreign.svg": (
            b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(23)'><foreignObject>"
            b"<body xmlns='http://www.w3.org/1999/xhtml' onload='alert(23)'/></foreignObject></svg>"
        ),
        "page.xhtml": b"<html xmlns='http://www.w3.org/1999/xhtml'><script>alert(24)</script></html>",
        "object.html": b"<object data='data:text/html,<script>parent.alert(25)</script>'></object>",
    }
    kinds = {"svg": "image/svg+xml", "xhtml": "application/xhtml+xml", "html": "text/html"}
    policy: dict[str, Any] = {
        "Effect": "Allow",
        "Action": "s3:GetObject",
        "Resource": f"arn:aws:s3:::photos/{trick(27)}*",
    }
    policy["Condition"] = {"StringLike": {"aws:username": trick(26)}}
    rule = {"ID": trick(28), "Status": "Enabled", "Filter": {"Prefix": trick(29)}, "Expiration": {"Days": 1}}
    with contextlib.closing(daemon.client()) as s3:
        s3.create_bucket(Bucket="tricks")
        for name, body in objects.items():
            kind = kinds.get(name.rpartition(".")[2], "application/octet-stream")
            s3.put_object(Bucket="tricks", Key=name, Body=body, ContentType=kind)
        s3.put_object(Bucket="tricks", Key=f"{trick(30)}/x", Body=b"")
        s3.put_bucket_lifecycle_configuration(Bucket="tricks", LifecycleConfiguration={"Rules": [rule]})

    def sent(method: str, target: str, body: bytes | dict[str, Any]) -> None:
        answer = daemon.request(
            method, target, body if isinstance(body, bytes) else json.dumps(body).encode()
        )
        assert answer.status < 300, answer.body

    sent("PUT", "/-/admin/policies/tricks", {"Version": "2012-10-17", "Statement": [policy]})
    sent("POST", "/-/admin/users", {"user_id": "tricked", "display_name": trick(31), "email": trick(32)})
    sent("POST", "/-/modules?name=tricks", USER_OP.format(summary=trick(33), error=trick(34)).encode())
    steps = [{"op": "decode"}, {"op": "encode", "args": {"format": "png"}}]
    view = {"kind": "transform", "ops": steps, "prefix": trick(35)}
    sent("POST", "/-/views", {"bucket": "tricks", "name": "made", "view": view})

    seen: dict[int, str] = {}

    def look(*numbers: int, where: str) -> None:
        for number in numbers:
            page.get_by_text(trick(number)).first.wait_for(state="attached")
            seen[number] = where

    for name, shown in {"columns.parquet": (20, 21), "names.zip": (22,)}.items():
        browser.show("/buckets/tricks", f"button:has-text('{name}')")
        page.click(f"button:has-text('{name}')")
        look(*shown, where=name)
        page.keyboard.press("Escape")
    for number, name in enumerate(list(objects)[2:], 23):
        page.click(f"button:has-text('{name}')")
        page.wait_for_selector("dialog pre")
        assert page.locator("dialog pre").inner_text() == objects[name].decode()
        seen[number] = name
        page.keyboard.press("Escape")
    look(30, where="a folder")
    page.click("button:has-text('Settings')")
    page.wait_for_selector("section[aria-label='What expires'] li")
    look(28, 29, where="a lifecycle rule")
    browser.show("/users", "section[aria-label=Policies] summary")
    page.click("section[aria-label=Policies] summary:has-text('tricks')")
    look(26, 27, where="a named policy")
    assert (
        "Who has this policy may read objects"
        in page.locator("section[aria-label=Policies] .words").last.inner_text()
    )
    look(31, 32, where="a user")
    browser.show("/ops", "section[aria-label=Library] td")
    look(33, where="an op")
    page.fill("[name=sample]", "s3://tricks/page.xhtml")
    page.fill("[name=ops]", '[{"op": "tricks/hostile"}]')
    page.click("button:has-text('Run')")
    page.wait_for_selector(".problem")
    look(34, where="an error of an op")
    browser.show("/views", "summary")
    look(35, where="a view")
    browser.show("/audit", "td")
    look(30, where="the audit log")
    browser.show(f"/buckets/tricks?prefix={quote(trick(36))}", "text=Nothing here")
    assert page.input_value("[name=prefix]") == trick(36)
    page.goto(f"{daemon.endpoint}/-/console/#/{trick(37)}")
    page.wait_for_selector("h1")
    assert set(seen) == set(range(20, 36))
    assert (
        page.locator("main [onerror], main iframe, main [onbegin], main [ontoggle], main [onfocus]").count()
        == 0
    )
    assert browser.trouble == []


def test_a_key_without_rights_is_told_so_in_sentences(daemon: Daemon, chromium: Any) -> None:
    daemon.request("POST", "/-/admin/users", b'{"user_id": "guest"}')
    key = json.loads(daemon.request("POST", "/-/admin/keys", b'{"user_id": "guest"}').body)
    with open_browser(chromium, daemon) as browser:
        browser.page.goto(f"{daemon.endpoint}/console")
        browser.page.fill("[name=access]", key["access_key"])
        browser.page.fill("[name=secret]", "wrong")
        browser.page.click("button[type=submit]")
        browser.page.wait_for_selector("text=No such access key, or not its secret key.")
        browser.sign_in(key["access_key"], key["secret_key"])
        browser.page.wait_for_selector("text=are shown to root alone")
        for address in ("/buckets/photos", "/users"):
            browser.show(address, ".problem")
            assert (
                browser.page.locator(".problem").first.inner_text().startswith("Your key may not do this: ")
            )
        daemon.request("PATCH", f"/-/admin/keys/{key['access_key']}", b'{"enabled": false}')
        browser.page.goto(f"{daemon.endpoint}/-/console/#/buckets")
        browser.page.wait_for_selector("text=The session has ended: sign in again.")


def test_a_page_outlives_its_node(daemon: Daemon, browser: Browser) -> None:
    browser.show("/overview", "text=Everything is in order.")
    daemon.stop()
    browser.page.wait_for_selector(".problem:has-text('may be old')")
    daemon.up()
    browser.page.wait_for_selector(".problem", state="detached")
    browser.page.click("text=Sign out")
    browser.page.wait_for_selector("[name=secret]")
    assert browser.context.cookies() == []
