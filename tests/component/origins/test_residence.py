"""What of a bucket lies on a node; and letting go what is only cached."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.support.daemons import Daemon
from tests.support.job_fixtures import ended
from tests.support.origin_fixtures import eventually

if TYPE_CHECKING:
    from pathlib import Path


def test_what_lies_here_and_goes_again(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.bin").write_bytes(bytes(1000))
    (tmp_path / "large.bin").write_bytes(bytes(9 << 20))  # more than a chunk
    with Daemon.start() as daemon:

        def ask(method: str, target: str, body: bytes = b"") -> Any:
            answer = daemon.request(method, target, body)
            return json.loads(answer.body)

        s3 = daemon.client()
        s3.create_bucket(Bucket="plain")
        s3.put_object(Bucket="plain", Key="a/1", Body=b"12345")
        s3.put_object(Bucket="plain", Key="b/1", Body=b"1")
        found = ask("GET", "/-/residence/plain?prefix=a/")
        assert (found["objects"], found["bytes"], found["cached"]) == (1, 5, False)
        assert found["capacity"] > found["used"] > 0
        assert ask("DELETE", "/-/residence/plain")["error"]["code"] == "BadRequest"
        origin = json.dumps({"url": f"file://{tmp_path}", "write": "off"}).encode()
        ask("PUT", "/-/buckets/backed", origin)
        assert ask("GET", "/-/residence/backed")["bytes"] == 0
        ask("POST", "/-/jobs", b'{"kind": "prefetch", "source": "s3://backed/"}')
        job = ask("GET", "/-/jobs")["jobs"][0]["id"]
        assert ended(daemon, {"id": job})["state"] == "done"
        found = ask("GET", "/-/residence/backed")
        assert (found["objects"], found["bytes"], found["cached"]) == (4, 3000 + (9 << 20), True)
        gone = ask("DELETE", "/-/residence/backed?prefix=large")
        assert (gone["objects"], gone["bytes"]) == (1, 9 << 20)
        assert ask("GET", "/-/residence/backed")["bytes"] == 3000
        assert len(s3.get_object(Bucket="backed", Key="large.bin")["Body"].read()) == 9 << 20  # comes again
        before = ask("GET", "/-/residence/backed")
        assert before["misses"] >= 5  # the load's, and those of the read after it
        for _ in range(3):
            assert s3.get_object(Bucket="backed", Key="0.bin")["Body"].read() == bytes(1000)
        eventually(lambda: ask("GET", "/-/residence/backed")["hits"] >= before["hits"] + 3)
        assert ask("GET", "/-/residence/backed")["idle_s"] < 60
        node = ask("GET", "/-/residence/")
        assert (node["bytes"], node["objects"]) >= (6, 2)
        assert node["cached_bytes"] >= 3000
        assert node["disks"][0]["total"] > node["disks"][0]["free"] > 0
        assert ask("GET", "/-/residence/none")["error"]["code"] == "NoSuchBucket"
