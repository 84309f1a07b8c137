"""Clients that write the same few names at the same time, over many connections to one node.

Law: each write is sent once, with a value of its own. Writes come in bursts; the next burst begins when all
writes of the last one have ended. The names are decided by one node, the victim, and owned by one other node:
what the victim acknowledged must be at that other owner, whatever befell it meanwhile. After `hold` no burst
begins, so that no later write hides a loss.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from botocore.exceptions import BotoCoreError, ClientError

from meshwire.cluster import routes
from tests.faults.clients import BUCKET, LONGEST, attempted, connect, content, now, read_value
from tests.faults.history import ABSENT, Read, Write
from tests.faults.registers import Registers
from tests.support.bounded_wait import await_end

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshwire.cluster import ClusterMap

FEWEST: Final = 16
MOST: Final = 24
"""Writes of one burst."""
NAMES: Final = 3
_SOURCES: Final = 4
_PATIENCE: Final = 20.0
_PAUSE: Final = 0.4
_HASTE: Final = 0.05
_SCATTERED: Final = 0.15  # of the bursts go through all nodes; before a loss none, as they would end after it
_KINDS: Final = ("put",) * 16 + ("delete", "copy", "copy", "upload")


def names_owned(cluster: ClusterMap, deciding: str, other: str, prefix: str, count: int) -> list[str]:
    """Names that one node decides about, and that it owns together with one other node."""
    table, found, number = routes(cluster, 2), list[str](), 0
    while len(found) < count:
        key, number = f"{prefix}-{number}", number + 1
        owners = [node.node_id for node in table.route_of_key(BUCKET, key).read_set]
        if owners == [deciding, other]:
            found.append(key)
        assert number < 100_000, f"{deciding} and {other} own nothing together: {cluster}"
    return found


class ConcurrentWriters:
    """At work between `start` and `stop`. `hurried`: with short pauses."""

    def __init__(
        self, endpoints: Mapping[str, str], keys: tuple[str, str], seed: int, victim: str, other: str
    ) -> None:
        self.seen, self.bursts, self.hurried = Registers(), 0, False
        self._victim, self._other, self._prefix = victim, other, f"concurrent/{seed}"
        self._keys, self._serial, self._renewals = keys, 0, 0
        self._s3 = {
            node: connect(endpoint, keys, attempts=1, patience=_PATIENCE)
            for node, endpoint in endpoints.items()
        }
        self._names, self._sources = list[str](), list[str]()
        self._chance, self._stop, self._held = random.Random(seed), threading.Event(), threading.Event()
        self._turn = threading.Lock()  # held by a burst, and by who changes the names
        self._thread = threading.Thread(target=self._work, name="concurrent writers")

    def __repr__(self) -> str:
        return f"<ConcurrentWriters of {self._victim} and {self._other}: {self.seen.counts()}>"

    def start(self, cluster: ClusterMap) -> None:
        """Begin with names of this map."""
        self.renew(cluster)
        self._thread.start()

    def renew(self, cluster: ClusterMap) -> None:
        """Write other names from now on, each of which has an acknowledged value."""
        with self._turn:
            self._renewals += 1
            prefix = f"{self._prefix}-{self._renewals}"
            names = names_owned(cluster, self._victim, self._other, prefix, NAMES + _SOURCES)
            self._names, self._sources = names[:NAMES], names[NAMES:]
            for key in names:
                self._write("put", key, self._victim, self._value(key), "")
        self._held.clear()

    def hold(self) -> None:
        """Begin no burst any more, until `renew`."""
        self._held.set()

    def await_bursts(self, count: int) -> None:
        """Wait until so many more bursts have ended."""
        until, end = self.bursts + count, now() + LONGEST
        while self.bursts < until and now() < end:
            threading.Event().wait(0.01)

    def survived(self, endpoints: Sequence[str]) -> None:
        """Read every name at these nodes, which must have what was acknowledged."""
        keys = [*self._names, *self._sources]
        for endpoint in endpoints:
            s3 = connect(endpoint, self._keys, attempts=8)
            for key in keys:
                began = now()
                value = _value_or_error(s3, key)
                self.seen.certain.append(Read(key, value, began, now()))

    def final(self, endpoint: str) -> dict[str, str]:
        """What every name of this schedule is, by this endpoint."""
        s3: Any = connect(endpoint, self._keys, attempts=8)
        return {key: _value_or_error(s3, key) for key in sorted({write.key for write in self.seen.writes})}

    def stop(self) -> Registers:
        """Everything that was done, once the last burst has ended."""
        self._stop.set()
        await_end(self._thread, patience=LONGEST)
        return self.seen

    def _work(self) -> None:
        with ThreadPoolExecutor(MOST + 2) as pool:
            while not self._stop.wait(_HASTE if self.hurried else _PAUSE):
                with self._turn:
                    if not self._held.is_set():
                        self._burst(pool)
                self.bursts += 1

    def _burst(self, pool: ThreadPoolExecutor) -> None:
        scattered = not self.hurried and self._chance.random() < _SCATTERED
        nodes, chance, calls = sorted(self._s3), self._chance, list[partial[None]]()
        for _ in range(chance.randint(FEWEST, MOST)):
            kind, key, source = (chance.choice(each) for each in (_KINDS, self._names, self._sources))
            via = chance.choice(nodes) if scattered else self._victim
            value = ABSENT if kind == "delete" else self._value(source if kind == "copy" else key)
            calls.append(partial(self._write, kind, key, via, value, source))
        for _ in range(2):
            calls.append(partial(self._read, chance.choice(self._names), chance.choice(nodes)))
        wait([pool.submit(call) for call in calls])

    def _write(self, kind: str, key: str, via: str, value: str, source: str) -> None:
        began = now()
        outcome = attempted(self._s3[via], lambda s3: _send(s3, kind, key, value, source))
        self.seen.writes.append(Write(key, value, began, now(), outcome))

    def _value(self, key: str) -> str:
        """A value of its own; that of a source is always the same, so that copies of it are known."""
        if key in self._sources:
            return f"{key.rpartition('/')[2]}-source-small"
        self._serial += 1
        return f"{self._prefix.rpartition('/')[2]}.{self._serial}-small"

    def _read(self, key: str, via: str) -> None:
        began = now()
        try:
            value = read_value(self._s3[via], key)
        except (BotoCoreError, ClientError):
            return
        self.seen.reads.append(Read(key, value, began, now()))


def _send(s3: Any, kind: str, key: str, value: str, source: str) -> None:
    if kind == "delete":
        s3.delete_object(Bucket=BUCKET, Key=key)
    elif kind == "copy":
        s3.copy_object(Bucket=BUCKET, Key=key, CopySource={"Bucket": BUCKET, "Key": source})
    elif kind == "put":
        s3.put_object(Bucket=BUCKET, Key=key, Body=content(value))
    else:
        upload = s3.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
        about = {"Bucket": BUCKET, "Key": key, "UploadId": upload}
        etag = s3.upload_part(**about, PartNumber=1, Body=content(value))["ETag"]
        parts = [{"PartNumber": 1, "ETag": etag}]
        s3.complete_multipart_upload(**about, MultipartUpload={"Parts": parts})


def _value_or_error(s3: Any, key: str) -> str:
    """What cannot be read is no value that anybody wrote."""
    try:
        return read_value(s3, key)
    except (BotoCoreError, ClientError) as error:
        return f"{type(error).__name__}: {error}"
