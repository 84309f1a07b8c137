"""How fast the console is in a real browser: `python -m bench.console_paint --objects 1000000`.

One node with a bucket of so many objects and a plan of photographs; headless Chromium. For the bucket: from
the navigation to the first paint and to the rows, then jumps of a thousand rows, with their requests. For the
inspector: steps by the keyboard through batches that the node has, from the key until the pictures are drawn,
and the CPU of each kind of process. With `--training SECONDS`, the page of the jobs instead, while a loop
reads batches at an even pace: what it costs, and whether its heap grows.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
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
_BATCH_EVERY: Final = 0.5  # seconds
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
    parser.add_argument("--training", type=float, default=0.0, help="seconds; nothing else is measured then")
    given = parser.parse_args()
    if given.training:
        given.objects = 0
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
            if given.training:
                _training(daemon, browser, given)
                return
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


def _loader(given: argparse.Namespace, report: str = "") -> mesh.Loader:
    found = mesh.open("s3://photos", fields={"image": "jpg"}).map(
        ops.decode("image"), ops.random_resized_crop("image", given.size), ops.to_chw("image")
    )
    return mesh.Loader(found, global_batch=given.rows, seed=1, output="numpy", report=report or None)


def _training(daemon: Daemon, browser: Browser, given: argparse.Namespace) -> None:
    """Train without a viewer, and with one; print what differs."""
    page, stop = browser.page, threading.Event()
    debugger = browser.context.new_cdp_session(page)
    rows = [0]

    def train() -> None:
        with _loader(given, "bench") as loader:
            while not stop.is_set():
                for batch in loader:
                    rows[0] += batch.rows
                    if stop.wait(_BATCH_EVERY):
                        return

    def heap() -> str:
        debugger.send("HeapProfiler.collectGarbage")
        used = debugger.send("Runtime.getHeapUsage")["usedSize"] / 1e6
        return f"{used:.2f} MB, {debugger.send('Memory.getDOMCounters')['nodes']} nodes of the document"

    def spent(note: str) -> None:
        before, read, began = _spent(daemon), rows[0], time.monotonic()
        page.wait_for_timeout(1000 * given.training)
        took, after = time.monotonic() - began, _spent(daemon)
        shares = [f"{name} {(cpu - before[name]) / took:.2%}" for name, cpu in sorted(after.items())]
        print(f"{note}: {(rows[0] - read) / took:.0f} rows/s; of a core: {', '.join(shares)}", flush=True)

    loop = threading.Thread(target=train)
    loop.start()
    try:
        for _ in range(2):
            page.goto("about:blank")
            page.wait_for_timeout(10_000)
            spent("no page ")
            browser.show("/jobs", "article[aria-label='Loop bench']")
            page.wait_for_timeout(40_000)  # until the page has its half minute
            print(f"heap at first {heap()}", flush=True)
            spent("the page")
            print(f"heap at last  {heap()}", flush=True)
    finally:
        stop.set()
        loop.join(60)


def _inspector(daemon: Daemon, browser: Browser, given: argparse.Namespace) -> None:
    with _loader(given) as loader:
        for step in range(given.steps + 1):
            loader.at(step)
        plan = loader.plan.hash
    page = browser.page
    browser.show(f"/batches/{plan}?batch={given.rows}", "[data-batch] canvas")
    taken, idle = list[float](), list[float]()

    def press(key: str, taken: list[float]) -> dict[str, float]:
        """Press a key at the pace; the CPU of each process meanwhile."""
        before, began = _spent(daemon), time.monotonic()
        for step in range(1, given.steps + 1):
            page.keyboard.press(key)
            taken.append(page.evaluate("step => afterStep(step)", step if key == "ArrowRight" else 0))
            page.wait_for_timeout(max(0.0, 1000 * (began + step * _PACE - time.monotonic())))
        return {process: cpu - before[process] for process, cpu in _spent(daemon).items()}

    nothing, spent = press("x", idle), press("ArrowRight", taken)
    told = page.locator("[data-batch] [role=status]").inner_text()
    print(f"inspector, {given.rows} × {given.size} px: {given.steps} steps {_spread(taken)}; {told}")
    print("  CPU a step, without that of a key that does nothing:")
    for process in sorted(spent):
        print(f"  {process:24} {1000 * (spent[process] - nothing[process]) / given.steps:7.1f} ms")
    total = sum(spent.values()) - sum(nothing.values())
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
