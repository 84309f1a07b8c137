"""What pages of the console that stay open cost the nodes: `python -m bench.console_cost`.

For each process of the nodes of a mesh of three: the CPU that it takes for each further page, as the share of
a core. The pages watch what the overview watches for root; all are at the first node.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Final

from tests.support.console_client import PREFIX, ConsoleClient
from tests.support.daemon_cluster import DaemonCluster
from tests.support.wakeups import spent_by_daemon

if TYPE_CHECKING:
    from http.client import HTTPResponse

    from tests.support.daemons import Daemon

_SETTLE: Final = 6.0  # seconds after the start, and after a page was opened
_WATCHED: Final = "watch=/-/activity&watch=/-/cluster"


def open_page(stack: contextlib.ExitStack, page: ConsoleClient) -> HTTPResponse:
    """Open the stream of one page, and read it until the stack ends."""
    connection = stack.enter_context(contextlib.closing(page.connect()))
    headers = {"Cookie": page.cookie, "x-mesh-console": page.csrf}
    connection.request("GET", f"{PREFIX}/events?{_WATCHED}", headers=headers)
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(response.read().decode(errors="replace"))
    threading.Thread(target=_drain, args=(response,), daemon=True).start()
    return response


def _drain(response: HTTPResponse) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        while response.readline():
            pass


def main() -> None:
    """Print a line for each process and number of pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--pages", type=int, nargs="+", default=[0, 5, 10])
    given = parser.parse_args()
    with DaemonCluster.start(3, args=["--console", "on"]) as mesh, contextlib.ExitStack() as stack:
        page = ConsoleClient.of(mesh["n1"])
        page.sign_in()
        idle: dict[str, float] = {}
        opened = 0
        for pages in sorted(given.pages):
            for _ in range(pages - opened):
                open_page(stack, page)
            opened = pages
            time.sleep(_SETTLE)
            before = _spent(mesh)
            time.sleep(given.seconds)
            after = _spent(mesh)
            for process, cpu in after.items():
                share = (cpu - before[process]) / given.seconds
                idle.setdefault(process, share)
                each = f", {(share - idle[process]) / pages:6.2%} a page" if pages else ""
                print(f"{pages:3} pages: {process:20} {share:7.2%} of a core{each}", flush=True)


def _spent(mesh: DaemonCluster) -> dict[str, float]:
    def of(node: str, daemon: Daemon) -> dict[str, float]:
        return {f"{node} {name}": spent.cpu for name, spent in spent_by_daemon(daemon).items()}

    return {name: cpu for node in ("n1", "n2", "n3") for name, cpu in of(node, mesh[node]).items()}


if __name__ == "__main__":
    main()
