"""Which of the shipped alerts fire in a real Prometheus, without their `for:`, which would take minutes."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import yaml

from tests.monitoring.scraping import prometheus
from tests.monitoring.shipped_files import RULES
from tests.support.bounded_wait import await_true

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.monitoring.scraping import Prometheus
    from tests.support.daemons import Daemon

_PATIENCE = 120.0  # 30 s were seen
OF_THE_MACHINE = {"DiskFull", "DiskFills", "MemoryShort", "SlowDisk", "SlowReads"}
"""What they say depends on where the test runs."""
OF_TWO_POINTS = {"MapsDiffer", "TransformsQueue", "DisksSeek", "BatchesRefused", "TrainingStarves"}
"""Without `for:` they fire for a moment in a mesh that is well."""


class Watch:
    """Which alerts fire."""

    def __init__(self, found: Prometheus) -> None:
        self._prometheus = found

    def firing(self, instance: str = "") -> set[str]:
        """Return the names of those about one node, or about none, without `Shardmesh`."""
        series = self._prometheus.query(f'ALERTS{{alertstate="firing", instance="{instance}"}}')
        return {each["metric"]["alertname"].removeprefix("Shardmesh") for each in series}

    def expect(self, *names: str, node: Daemon | None = None, again: Callable[[], object] = int) -> None:
        """Wait until these fire about a node, or about the mesh; meanwhile do something `again`: a rate needs
        failures in more than one second."""
        instance = "" if node is None else netloc(node)

        def fire() -> bool:
            again()
            return set(names) <= self.firing(instance)

        await_true(fire, _PATIENCE, told=lambda: self.firing(instance))


def netloc(daemon: Daemon) -> str:
    return daemon.endpoint.partition("://")[2]


@contextmanager
def watched(place: Path, daemons: Sequence[Daemon]) -> Iterator[Watch]:
    """Scrape these daemons, and evaluate the rules over them, for the length of the block."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    for group in groups:
        for rule in group["rules"]:
            rule.pop("for", None)
    rules = place / "rules.yaml"
    rules.write_text(yaml.safe_dump({"groups": groups}))
    with prometheus(place, [daemon.endpoint for daemon in daemons], rules) as found:
        found.wait(f'count(up{{job="shardmesh"}} == 1) == {len(daemons)}')
        yield Watch(found)
