"""What is made of stored data before a power cut: snapshots, plans, views and jobs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from botocore.exceptions import ClientError

from tests.powercuts.traffic import Traffic, ask, error_code
from tests.support.job_fixtures import ended, members, objects

if TYPE_CHECKING:
    import random
    from collections.abc import Hashable

    from tests.support.daemons import Daemon

_SAMPLES: Final = {f"{number:03}.txt": b"sample %d" % number * 400 for number in range(24)}


class Derived(Traffic):
    """What is made of stored samples: snapshots, plans, views, and jobs with their outputs, which go on after
    the cut."""

    def __init__(self) -> None:
        super().__init__()
        self._prepared = False
        self._made = 0

    def prepare(self, daemon: Daemon, client: Any) -> None:
        if self._prepared:
            return
        for bucket in ("samples", "made"):
            self._create_bucket(client, bucket)
        for key, body in _SAMPLES.items():
            client.put_object(Bucket="samples", Key=f"in/{key}", Body=body)
        time.sleep(3.0)  # relaxed stores keep what is that old
        self._prepared = True

    def change(self, daemon: Daemon, client: Any, number: int, chance: random.Random) -> None:
        asked: dict[str, Any]
        with self._counting:
            self._made += 1
            made = self._made
        match chance.choice(("view", "job", "plan")):
            case "view":
                count = chance.randrange(2, 9)
                view = {"kind": "shards", "prefix": "in/", "count": count}
                asked = {"bucket": "samples", "name": f"v{made}", "view": view}
                with self.changing(f"view v{made}", f"{-(-len(_SAMPLES) // count)} shards"):
                    ask(daemon, "POST", "/-/views", asked)
                time.sleep(chance.uniform(0.1, 0.4))
            case "job":
                target = f"s3://made/j{made}"
                asked = {"kind": "shard", "source": "s3://samples/in", "target": target, "count": 5}
                with self.changing(f"job j{made}", "done"):
                    ask(daemon, "POST", "/-/jobs", asked)
                time.sleep(chance.uniform(0.0, 1.0))
            case _:
                seed = chance.randrange(1000)
                fields = {"source": "s3://samples/in/", "fields": {"text": "txt"}}
                snapshot = ask(daemon, "POST", "/-/snapshots", fields)["snapshot"]
                asked = {"snapshot": snapshot, "spec": {"seed": seed, "ops": []}, "batch": 4}
                plan = ask(daemon, "POST", "/-/plans", asked)["plan"]
                # It is known by its content, and may have been there before.
                with self.changing(f"plan {plan}", "200"):
                    ask(daemon, "POST", "/-/plans", asked)

    def find(self, daemon: Daemon, client: Any, name: str) -> Hashable:
        kind, _, which = name.partition(" ")
        if kind == "plan":
            status = daemon.request("GET", f"/-/plans/{which}/0/1?batch=4").status
            return None if status == 404 else str(status)
        if kind == "view":
            try:
                found = objects(client, f"samples--{which}")
            except ClientError as error:
                return None if error_code(error) == "NoSuchBucket" else str(error)
            return f"{len(found)} shards" if members(*found.values()) == _SAMPLES else "other samples"
        asked = ask(daemon, "GET", "/-/jobs")["jobs"]
        jobs = [each for each in asked if each["spec"].get("target") == f"s3://made/{which}/"]
        if not jobs:
            return None
        state = ended(daemon, jobs[0])["state"]
        made = members(*objects(client, "made", f"{which}/").values())
        return state if made == _SAMPLES else f"{state}, {len(made)} of {len(_SAMPLES)} samples"
