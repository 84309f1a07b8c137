"""What a daemon costs while nobody asks it anything: `python -m bench.idle_cost`.

For each process of a standalone node with one and with two workers, and of a node of a mesh of three: the
share of a core, and wake-ups a second of all its threads; and the seconds until a node is ready, and of CPU
that its start and stop take. With `--checkout`, another checkout takes turns with this one.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.interleave import order
from bench.tables import verdict
from tests.support.daemon_cluster import DaemonCluster
from tests.support.daemons import Daemon
from tests.support.wakeups import spent_by_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

_SETTLE: Final = 6.0  # seconds after the start
_LEASE: Final = 5.0  # seconds, the default
_SHARE, _READY = 0.5, 1.0
"""The bars: % of a core of an idle standalone node, seconds until it is ready; at most."""


@contextmanager
def _standalone(workers: int, checkout: Path | None) -> Iterator[Daemon]:
    daemon = Daemon(None, (), {}, workers)
    daemon.checkout = checkout
    with daemon:
        daemon.up()
        yield daemon


@contextmanager
def _member(checkout: Path | None) -> Iterator[Daemon]:
    with DaemonCluster.start(3, lease=_LEASE, checkout=checkout) as mesh:
        yield mesh["n2"]


_KINDS: Final = {
    "standalone": lambda checkout: _standalone(1, checkout),
    "two workers": lambda checkout: _standalone(2, checkout),
    "one of three nodes": _member,
}


def main() -> None:
    """Print a line for each process, and one for start and stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--checkout", type=Path, help="another checkout, which takes turns with this one")
    given = parser.parse_args()
    sides = {"": None} if given.checkout is None else {"there, ": given.checkout, "here, ": None}
    for kind, start in _KINDS.items():
        shares, waits = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
        for number in range(given.rounds):
            for side in order(sides, number):
                with start(sides[side]) as daemon:
                    time.sleep(_SETTLE)
                    before = spent_by_daemon(daemon)
                    time.sleep(given.seconds)
                    for name, after in spent_by_daemon(daemon).items():
                        line = f"{side}{kind}: {name:14}"
                        shares[line].append((after.cpu - before[name].cpu) / given.seconds)
                        waits[line].append((after.waits - before[name].waits) / given.seconds)
        for line in sorted(shares):
            share, often = statistics.median(shares[line]), statistics.median(waits[line])
            print(f"{line} {share:8.2%} of a core, {often:6.1f} wake-ups a second", flush=True)
        for side in sides:
            names = [name for name in shares if name.startswith(f"{side}{kind}:")]
            share = sum(100 * statistics.median(shares[name]) for name in names)
            bar = "" if kind != "standalone" else f"; {verdict(share, _SHARE, at_most=True)}"
            print(f"{side}{kind}, all processes: {share:.2f} % of a core{bar}", flush=True)
    taken, waited = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for number in range(given.starts):
        for side in order(sides, number):
            used, began = _children_cpu(), time.monotonic()
            with _standalone(1, sides[side]):
                waited[side].append(time.monotonic() - began)
            taken[side].append(_children_cpu() - used)
    for side, each in taken.items():
        ready, cpu = statistics.median(waited[side]), statistics.median(each)
        print(f"{side}ready after {ready:.2f} s; {verdict(ready, _READY, at_most=True)}")
        print(f"{side}start and stop: {cpu:.2f} s of CPU, interpreter and imports included")


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
