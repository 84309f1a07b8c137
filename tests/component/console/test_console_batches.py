"""The console's batches, training loops and ops."""

from __future__ import annotations

import base64
import json
import re
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

import meshsdk as mesh
from meshsdk import loader_stats, ops
from meshsdk.client.request import Request
from meshwire.http_values.mesh_headers import LOADER_REPORT_HEADER
from tests.support.bounded_wait import await_true
from tests.support.console_browser import require_console
from tests.support.console_data import BATCH, SIZE, loader_of

if TYPE_CHECKING:
    from tests.support.console_browser import Browser
    from tests.support.daemons import Daemon

require_console()

pytestmark = pytest.mark.timeout(300)  # a browser that draws without a GPU gets little of a busy machine


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
        assert np.array_equal(pixels_of(browser, "main"), np.asarray(batch["image"]))
        names = browser.page.locator(".row-name").all_inner_texts()
        labels = [classes[int(label)] for label in batch["label"]]
        assert [name.split("/")[1] for name in names] == labels
    browser.page.click("ol.rows button >> nth=0")
    source = browser.page.locator("dialog .field a").first.inner_text()
    assert source == f"s3://photos/{names[0]}.jpg"
    told = browser.page.locator("[aria-label='What the ops drew for image'] li")
    told.first.wait_for()
    drawn = told.all_inner_texts()
    assert re.fullmatch(r"random_resized_crop cropped .* pixels at .*, scaled to 96 × 96", drawn[0])
    assert drawn[1] in ("hflip not applied", "hflip mirrored left to right")
    part = browser.page.locator("dialog .marked .part").get_attribute("data-part")
    assert np.array_equal(np.array(json.loads(part or "")), drawn_corners(daemon, plan, step, 0))
    browser.page.keyboard.press("Escape")
    browser.page.wait_for_selector("dialog", state="detached")
    browser.page.keyboard.press("Shift+ArrowRight")
    browser.page.wait_for_selector("[data-batch*='\"epoch\":1,']")


def test_rows_are_loaded_when_they_come_to_the_screen(
    daemon: Daemon, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame that is too large to be read at once; and one of pictures of unequal sizes."""
    rows, page = 32, browser.page
    with loader_of(daemon, "s3://photos/train", monkeypatch, global_batch=rows) as loader:
        expected, plan = np.asarray(loader.at(0)["image"]), loader.plan.hash
    browser.show(f"/batches/{plan}?batch={rows}", "[data-batch] canvas")
    counts = "['canvas', '.missing'].map((each) => document.querySelectorAll(`ol.rows ${each}`).length)"
    shown, missing = page.evaluate(counts)  # at one moment: more rows may be on their way
    assert shown + missing == rows
    assert min(shown, missing) > 0
    first = pixels_of(browser, "main")
    assert np.array_equal(first, expected[: len(first)])
    page.keyboard.press("End")
    page.wait_for_selector("ol.rows li:last-child canvas")
    assert np.array_equal(pixels_of(browser, "main"), expected)
    found = mesh.open("s3://photos/train", fields={"image": "jpg"}).map(ops.decode("image"))
    with mesh.Loader(found, global_batch=rows, seed=7, output="numpy") as loader:
        images, plan = loader.at(0)["image"], loader.plan.hash
    browser.show(f"/batches/{plan}?batch={rows}", f"[data-batch*='{plan}'] canvas")
    for row in (0, rows - 1):
        page.locator("ol.rows button").nth(row).click()
        page.wait_for_selector("dialog canvas.large")
        (pixels,) = canvases(browser, "dialog canvas.large")
        assert np.array_equal(pixels, np.asarray(images[row]))
        page.keyboard.press("Escape")
        page.wait_for_selector("dialog", state="detached")


def pixels_of(browser: Browser, where: str) -> Any:
    """The pictures below a selector, as a batch has them: uint8[rows, 3, height, width]."""
    shown = canvases(browser, f"{where} ol.rows canvas")
    return np.array(shown, np.uint8).reshape(-1, SIZE, SIZE, 3).transpose(0, 3, 1, 2)


PIXELS: Final = """selector => [...document.querySelectorAll(selector)].map((canvas) => {
    const { width, height } = canvas;
    const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
    const pieces = [];
    for (let at = 0; at < data.length; at += 8192)
        pieces.push(String.fromCharCode(...data.subarray(at, at + 8192)));
    return [height, width, btoa(pieces.join(""))];
})"""


def canvases(browser: Browser, selector: str) -> list[Any]:
    """What these canvases show: uint8[height, width, 3] each. As lists of numbers they would be on their way
    for seconds."""
    return [
        np.frombuffer(base64.b64decode(text), np.uint8).reshape(height, width, 4)[..., :3]
        for height, width, text in browser.page.evaluate(PIXELS, selector)
    ]


def test_batches_of_two_world_sizes_and_of_two_plans_stand_side_by_side(
    daemon: Daemon, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    @cache
    def read(seed: int, world: int, rank: int) -> tuple[str, list[Any]]:
        with loader_of(daemon, "s3://photos/train", monkeypatch, seed=seed, world=world, rank=rank) as loader:
            return loader.plan.hash, [np.asarray(loader.at(step)["image"]) for step in range(2)]

    def equal(name: str, step: int, seed: int, world: int, rank: int) -> None:
        plan, images = read(seed, world, rank)
        where = f"section[aria-label='{name}']"
        told = f'{plan}","epoch":0,"step":{step},"rank":{rank},"world":{world},'
        page.wait_for_selector(f"{where} [data-batch*='{told}'] canvas")
        assert np.array_equal(pixels_of(browser, where), images[step])

    page = browser.page
    second = page.locator("section[aria-label='Second batch']")
    browser.show(f"/batches/{read(7, 1, 0)[0]}?batch={BATCH}", "[data-batch] canvas")
    page.click("button:has-text('Side by side')")
    for field, value in {"Epoch": 0, "World size": 2, "Rank": 1}.items():
        second.get_by_label(field).fill(str(value))
        page.keyboard.press("Enter")
    equal("First batch", 0, 7, 1, 0)
    equal("Second batch", 0, 7, 2, 1)
    page.locator("h1").click()
    page.keyboard.press("ArrowRight")
    equal("First batch", 1, 7, 1, 0)
    equal("Second batch", 1, 7, 2, 1)
    browser.screenshot("two-world-sizes")
    other, _ = read(8, 2, 1)
    page.reload()  # the plan is chosen among those that the node knows
    second.get_by_label("Plan").select_option(other)
    equal("First batch", 1, 7, 1, 0)
    equal("Second batch", 1, 8, 2, 1)
    page.locator("h1").click()
    page.keyboard.press("[")
    equal("Second batch", 1, 8, 2, 0)
    assert browser.violations() == []
    browser.screenshot("two-plans")


CHANGE_BOTH = """() => {
  for (const [word, value] of [["World size", "2"], ["Rank", "1"]]) {
    const labels = [...document.querySelectorAll("form.address label")];
    const input = labels.find((label) => label.textContent.includes(word)).querySelector("input");
    input.value = value;
    input.dispatchEvent(new Event("change", { bubbles: true }));
  }
}"""


def test_two_changes_before_the_page_is_drawn_again_are_both_taken(
    daemon: Daemon, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loader_of(daemon, "s3://photos/train", monkeypatch, seed=9) as loader:
        plan = loader.plan.hash
    browser.show(f"/batches/{plan}?batch={BATCH}", "[data-batch] canvas")
    browser.page.evaluate(CHANGE_BOTH)
    browser.page.wait_for_selector('[data-batch*=\'"rank":1,"world":2,\'] canvas')
    assert "rank=1&world=2" in browser.page.url


def test_a_loop_is_as_far_as_what_it_has_received(
    daemon: Daemon, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loader has the whole epoch at once."""

    def told(name: str = "far-ahead") -> dict[str, float]:
        """The furthest of what the nodes to which it has reported say of it."""
        told = json.loads(daemon.request("GET", "/-/activity").body)["nodes"].values()
        found = [node["loaders"][name] for node in told if name in node["loaders"]]
        return {
            of: max(each[of] for each in found) for of in ("epochs", "epochs_requested", "samples") if found
        }

    monkeypatch.setattr(loader_stats, "_EVERY", 3600.0)  # only the end of the loop is told
    with loader_of(daemon, "s3://photos/train", monkeypatch, report="ended") as loader:
        assert sum(batch.rows for batch in loader) == 32
        await_true(lambda: told("ended").get("epochs") == 1)
        assert told("ended")["samples"] == 32
    monkeypatch.setattr(loader_stats, "_EVERY", 0.0)
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
        await_text(browser, ".meter", r"Epoch 0 (25|50).% of 32 samples, (75|50).% prefetched")
        earlier = {LOADER_REPORT_HEADER: "name=earlier;samples=8;waited=0.000;seconds=1.000"}  # no position
        asked = Request("GET", f"/-/plans/{loader.plan.hash}/0/2", f"batch={BATCH}", earlier)
        loader.dataset.client.transport.call(asked, lambda response: response.read(), 60)
        await_true(lambda: told("earlier"))
        assert told("earlier")["epochs"] == 2 / steps
        browser.page.wait_for_selector(
            "article[aria-label='Loop far-ahead'] >> text=Dataset: s3://photos, ops: decode → "
        )
        await_text(browser, "dl", r"CPU per sample\s+[0-9.]+ ms\s+Read time per sample\s+[0-9.]+ ms")
        await_text(browser, "dl", r"Shared batches\s+[0-9.]+.%")
        assert browser.page.locator("article[aria-label='Loop far-ahead'] >> text=User: root").count() == 1
        assert browser.violations() == []


def await_text(browser: Browser, part: str, expected: str) -> None:
    """Wait until the page, which looks at the nodes again and again, says so of the loop."""
    said = browser.page.locator(f"article[aria-label='Loop far-ahead'] {part}").inner_text
    await_true(lambda: re.search(expected, said()), told=said)


def drawn_corners(daemon: Daemon, plan: str, step: int, row: int) -> Any:
    """Where the corners of the row's picture lie in its source, as the node says."""
    answer = daemon.request("GET", f"/-/plans/{plan}/0/{step}/draws?rank=1&world=2&batch={BATCH}&row={row}")
    return json.loads(answer.body)["images"]["image"]["corners"]


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
    assert "a second run returned the same result" in page.locator("[aria-label=Result]").inner_text()
    page.fill("[name=ops]", '[{"op": "decode"}, {"op": "<b>no such op</b>"}]')
    page.click("button:has-text('Run')")
    page.wait_for_selector(".problem:has-text('<b>no such op</b>')")
