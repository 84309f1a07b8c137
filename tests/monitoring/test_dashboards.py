"""Every expression of every dashboard and rule gives data from a real node that has work."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import cv2
import numpy as np
import pytest
import yaml

import meshsdk as mesh
from meshoperator.monitoring.dashboards import DASHBOARDS
from meshoperator.monitoring.panels import COLUMNS, document
from meshoperator.monitoring.rules import RECORDINGS, rule_groups
from meshsdk import ops
from meshsdk.admin import jobs
from meshsdk.admin.views import create_view, transform_view
from meshsdk.client.gather import Item
from tests.monitoring.scraping import prometheus
from tests.required import required_program
from tests.support.daemon_cluster import DaemonCluster
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.monitoring.scraping import Prometheus

needs_prometheus = required_program("prometheus", "apt install prometheus")
PANELS = [panel for dashboard in DASHBOARDS for panel in dashboard.panels()]
EXPRESSIONS = sorted({query.expr for panel in PANELS if not panel.empty for query in panel.queries})
MAY_BE_EMPTY = sorted({query.expr for panel in PANELS if panel.empty for query in panel.queries})


def test_panels_do_not_overlap_and_have_words() -> None:
    for dashboard in DASHBOARDS:
        taken: set[tuple[int, int]] = set()
        for panel in document(dashboard, DASHBOARDS)["panels"]:
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken, panel["title"]
            assert place["x"] + place["w"] <= COLUMNS
            assert panel["type"] == "row" or len(panel["description"]) > 10
            taken |= cells


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus beside a node that did a little of everything, and a mesh of two."""
    place = tmp_path_factory.mktemp("prometheus")
    rules = place / "rules.yaml"
    rules.write_text(yaml.safe_dump(rule_groups()).replace("interval: 30s", "interval: 1s"))
    with Daemon.start() as daemon, DaemonCluster.start(2) as pair:
        work(daemon, place)
        mesh_work(pair)
        nodes = [urlsplit(endpoint).netloc for endpoint in (daemon.endpoint, *pair.endpoints.values())]
        with prometheus(place, nodes, rules) as found:
            found.wait("count_over_time(meshd_processes_up[30s]) > 3")
            yield found


def mesh_work(pair: DaemonCluster) -> None:
    """Objects that every node is asked for."""
    client = pair["n1"].client()
    client.create_bucket(Bucket="shared")
    for number in range(8):
        client.put_object(Bucket="shared", Key=f"{number}", Body=b"shared")
        pair["n2"].client().get_object(Bucket="shared", Key=f"{number}")


def work(daemon: Daemon, place: Path) -> None:
    """Objects, batches with a bad sample among them, a view, a gather, a job."""
    with mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client:
        client.create_bucket("photos")
        for number in range(24):
            image = cv2.imencode(".jpg", np.full((48, 48, 3), number * 10, np.uint8))[1].tobytes()
            client.put("photos", f"train/cat/{number:02}.jpg", image if number else image[:200])
        ds = mesh.open("s3://photos/train", fields={"image": "jpg", "label": "@class"}, client=client)
        ds = ds.map(ops.decode("image"), ops.center_crop("image", 32))
        with mesh.Loader(ds, 8, output="numpy", report="resnet50", max_bad=1.0) as loader:
            assert sum(batch.rows for batch in loader) == 24
        create_view(
            client.transport,
            "photos",
            "small",
            transform_view([{"op": "decode"}, {"op": "encode", "args": {"format": "png"}}]),
        )
        for _ in range(2):
            assert client.get("photos--small", "train/cat/05.jpg")
        list(client.gather([Item("photos", "train/cat/03.jpg")]))
        job = jobs.start_job(
            client.transport, jobs.shard_job("s3://photos/train/", "s3://photos/shards/", count=10)
        )
        assert jobs.wait_for_job(client.transport, job.id).state == "done"


def _asked(expr: str) -> str:
    return expr.replace("$instance", ".*").replace("$__rate_interval", "30s")


@needs_prometheus
@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_it_gives_data(busy: Prometheus, expr: str) -> None:
    assert busy.wait(_asked(expr))


@needs_prometheus
@pytest.mark.parametrize("expr", MAY_BE_EMPTY)
def test_what_is_empty_when_all_is_well_is_an_expression(busy: Prometheus, expr: str) -> None:
    busy.query(_asked(expr))


@needs_prometheus
@pytest.mark.parametrize("record", [rule.record for rule in RECORDINGS])
def test_it_is_recorded(busy: Prometheus, record: str) -> None:
    assert busy.wait(record)
