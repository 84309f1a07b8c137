"""What the nodes tell of a plan that is looked into: its ops, what they took, where its source lies.

Law: asks; whatever is not told is left out, and the advice is less precise for it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Final

import numpy as np

from meshsdk.buckets import show_bucket
from meshsdk.doctor.advising import Circumstances
from meshsdk.errors import MeshError
from meshsdk.library import show_op
from meshsdk.scraping import scrape
from meshsdk.transport import Request
from meshwire.plans import PlanError, parse_spec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshsdk.doctor.checkups import Network, Subject
    from meshsdk.native import FieldSchema
    from meshsdk.scraping import Scrape
    from meshsdk.transport import Transport
    from meshwire.plans import PlanSpec

_PATIENCE: Final = 5.0  # seconds: advice is not worth more
_MOST: Final = 16  # nodes asked for their counters


@dataclass(slots=True)
class Enquiry:
    """Looks at the nodes' counters when the first run begins and when it has ended."""

    transport: Transport
    _before: dict[str, float] = field(default_factory=dict)
    _spent: dict[str, float] = field(default_factory=dict)
    _transforms: int = 0

    def begins(self, run: str) -> None:
        """A run begins; that of fetching has been the first."""
        if run not in ("fetch", "preprocessing"):
            return
        told = self._told()
        seconds: dict[str, float] = {}
        for node in told:
            for op, taken in node.by("meshd_op_seconds_total", "op").items():
                seconds[op] = seconds.get(op, 0.0) + taken
        if run == "fetch":
            self._before = seconds
        else:
            self._spent = {op: taken - self._before.get(op, 0.0) for op, taken in seconds.items()}
            self._transforms = int(sum(node.total("meshd_processes_up", role="transform") for node in told))

    def _told(self) -> list[Scrape]:
        """What nodes say now, those that answer."""
        directory = self.transport.router.directory
        cluster = directory.current()
        asked = [self.transport.settings.endpoint]
        if cluster is not None:
            asked = [directory.endpoint(node) for node in cluster.nodes if node.state == "up"]
        found = []
        for endpoint in asked[:_MOST]:
            with suppress(MeshError):
                found.append(scrape(endpoint, _PATIENCE))
        return found

    def circumstances(self, subject: Subject, network: Network) -> Circumstances:
        """All that can be learned."""
        spec = self._plan(subject.plan.hash)
        ops = dict.fromkeys(() if spec is None else (op.op for op in spec.ops), 0.0)
        for op in ops:
            # Ops that run as one step are counted under both names.
            ops[op] = sum(seconds for name, seconds in self._spent.items() if op in name.split("+"))
        return Circumstances(
            spec=spec,
            dtypes=_widths(subject.plan.fields),
            source=subject.source,
            ops={op: seconds for op, seconds in ops.items() if seconds > 0},
            random=frozenset(op for op in ops if self._draws(op)),
            transforms=self._transforms,
            origin=self._from_origin(subject.source),
            connections=subject.connections,
            verify=subject.verify,
            network=network,
        )

    def _plan(self, digest: str) -> PlanSpec | None:
        with suppress(MeshError, PlanError, KeyError, TypeError):
            return parse_spec(self.transport.json(Request("GET", f"/-/plans/{digest}"), _PATIENCE)["spec"])
        return None

    def _draws(self, op: str) -> bool:
        with suppress(MeshError):
            return show_op(self.transport, op).random
        return False

    def _from_origin(self, source: str) -> bool:
        bucket = source.removeprefix("s3://").partition("/")[0]
        with suppress(MeshError, KeyError, TypeError):
            return bool(bucket) and bool(show_bucket(self.transport, bucket).origin)
        return False


def _widths(fields: Mapping[str, FieldSchema]) -> dict[str, int]:
    """Bytes of a row by dtype; of ragged fields nothing is known."""
    found: dict[str, int] = {}
    for each in fields.values():
        if each.shape is not None:
            width = 2 if each.dtype == "bfloat16" else np.dtype(each.dtype).itemsize
            found[each.dtype] = found.get(each.dtype, 0) + prod(each.shape) * width
    return found
