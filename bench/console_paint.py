"""How fast the console is in a real browser: `python -m bench.console_paint --objects 1000000`.

One node with a bucket of so many objects and a plan of photographs; headless Chromium. For the bucket: from
the navigation to the first paint and to the rows, then jumps of a thousand rows, with their requests. For the
inspector: steps by the keyboard through batches that the node has, from the key until the pictures are drawn,
and the CPU of each kind of process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import meshsdk as mesh
from bench.processes import family
from meshdemo.photographs import photographs
from meshsdk import ops
from tests.support.console_browser import open_browser, running_chromium
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.console_browser import Browser

_PHOTOGRAPHS: Final = 64
_WORKERS: Final = 2
_PACE: Final = 0.7  # seconds between the steps of somebody who looks at them
_TIMES: Final = """
addEventListener("keydown", () => { self.pressed = performance.now(); }, true);
self.afterStep = (step) => new Promise((done) => {
    const look = () => {
        const there = document.querySelector(`[data-batch*='"step":${step},'] ol.rows canvas`);
        if (!there) return requestAnimationFrame(look);
        requestAnimationFrame(() => setTimeout(() => done(performance.now() - self.pressed)));
    };
    look();
});
"""


def main() -> None:
    """Print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, default=1_000_000)
    parser.add_argument("--opened", type=int, default=7, help="times that the bucket is opened")
    parser.add_argument("--screens", type=int, default=40, help="jumps of a thousand rows")
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    given = parser.parse_args()
    args = ("--console", "on", "--durability", "relaxed")
    with Daemon.start(args=args, workers=_WORKERS) as daemon, running_chromium() as chromium:
        os.environ |= {
            "MESH_ENDPOINT": daemon.endpoint,
            "AWS_ACCESS_KEY_ID": daemon.access_key,
            "AWS_SECRET_ACCESS_KEY": daemon.secret_key,
        }
        _fill(mesh.connect(), given.objects, given.rows * (given.steps + 1))
        with open_browser(chromium, daemon, viewport={"width": 1280, "height": 900}) as browser:
            browser.page.add_init_script(_TIMES)
            browser.sign_in(daemon.access_key, daemon.secret_key)
            if given.objects:
                _listing(browser, given.opened, given.screens)
            if given.steps:
                _inspector(daemon, browser, given)


def _fill(client: mesh.Client, objects: int, samples: int) -> None:
    made = [photograph.jpeg for photograph in photographs(_PHOTOGRAPHS)]
    client.create_bucket("many")
    client.create_bucket("photos")
    client.put_many("many", ((f"{number:09}.txt", b"x") for number in range(objects)))
    client.put_many(
        "photos",
        ((f"{number:06}.jpg", made[number % len(made)]) for number in range(samples)),
    )


def _listing(browser: Browser, opened: int, screens: int) -> None:
    page, requests = browser.page, list[str]()
    page.on("request", lambda request: requests.append(request.url))
    paints, rows = list[float](), list[float]()
    for _ in range(opened):
        page.goto("about:blank")
        page.goto(f"{browser.endpoint}/-/console/#/buckets/many")
        page.wait_for_selector(".object .name button")
        rows.append(page.evaluate("performance.now()"))
        paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
    print(f"first paint {_spread(paints)}, rows {_spread(rows)}", flush=True)
    requests.clear()
    most = 0
    for screen in range(1, screens + 1):
        page.evaluate("document.querySelector('.objects').scrollTop += 34 * 1000")
        page.wait_for_selector(f".object[aria-rowindex='{2 + 1000 * screen}'] .name button")
        most = max(most, page.locator(".object").count())
    listings = sum("list-type=2" in url for url in requests)
    heap = page.evaluate("performance.memory.usedJSHeapSize")
    print(
        f"{screens} screens: {len(requests)} requests, {listings} of them listings; at most {most} rows in "
        f"the document, {heap / (1 << 20):.1f} MiB of heap",
        flush=True,
    )


def _inspector(daemon: Daemon, browser: Browser, given: argparse.Namespace) -> None:
    found = mesh.open("s3://photos", fields={"image": "jpg"}).map(
        ops.decode("image"), ops.random_resized_crop("image", given.size), ops.to_chw("image")
    )
    with mesh.Loader(found, global_batch=given.rows, seed=1, output="numpy") as loader:
        for step in range(given.steps + 1):
            loader.at(step)
        plan = loader.plan.hash
    page = browser.page
    browser.show(f"/batches/{plan}?batch={given.rows}", "[data-batch] canvas")
    taken, before = list[float](), _spent(daemon)
    began = time.monotonic()
    for step in range(1, given.steps + 1):
        page.keyboard.press("ArrowRight")
        taken.append(page.evaluate("step => afterStep(step)", step))
        page.wait_for_timeout(max(0.0, 1000 * (began + step * _PACE - time.monotonic())))
    after = _spent(daemon)
    told = page.locator("[data-batch] [role=status]").inner_text()
    print(f"inspector, {given.rows} × {given.size} px: {given.steps} steps {_spread(taken)}; {told}")
    for process, cpu in sorted(after.items()):
        print(f"  {process:24} {1000 * (cpu - before[process]) / given.steps:7.1f} ms of CPU a step")
    total = sum(after.values()) - sum(before.values())
    print(f"  {'together':24} {1000 * total / given.steps:7.1f} ms")


def _spent(daemon: Daemon) -> dict[str, float]:
    """Seconds of CPU of the browser's processes by kind, and of the daemon's together."""
    found = defaultdict[str, float](float)
    nodes = {process.pid for process in family(daemon.pid)}
    for process in family(os.getpid()):
        words: list[str] = process.cmdline()
        times = process.cpu_times()
        cpu = times.user + times.system
        if process.pid in nodes:
            found["node"] += cpu
        elif words and "chrom" in words[0]:
            kind = next((word.removeprefix("--type=") for word in words if word.startswith("--type=")), "")
            found[f"browser {kind}".rstrip()] += cpu
    return found


def _spread(taken: Sequence[float]) -> str:
    return f"median {statistics.median(taken):.0f} ms, slowest {max(taken):.0f}"


if __name__ == "__main__":
    main()
