"""The dashboards that ship: their JSON, the metrics they name, and that every expression gives data from a
real node under load."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.monitoring.node_work import work
from tests.monitoring.scraping import prometheus
from tests.monitoring.shipped_files import (
    DASHBOARDS,
    PANELS,
    RECORDINGS,
    RULES,
    exported_series,
    named_series,
    panel_expressions,
)
from tests.support.daemon_cluster import DaemonCluster
from tests.support.daemons import Daemon
from tests.support.required import required_program

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.monitoring.scraping import Prometheus

needs_prometheus = required_program("prometheus", "apt install prometheus")
EXPRESSIONS = panel_expressions(may_be_empty=False)
MAY_BE_EMPTY = panel_expressions(may_be_empty=True)


UNITS = {"short", "Bps", "bytes", "s", "percentunit", "reqps", "ops", "none"}
COLUMNS = 24


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_is_found_and_linked(name: str) -> None:
    """Its uid is its address in every Grafana, so it never changes; the schema is that of Grafana 10."""
    dashboard = DASHBOARDS[name]
    assert dashboard["uid"] == name
    assert dashboard["schemaVersion"] == 39
    assert dashboard["tags"] == ["shardmesh"]
    assert len(dashboard["description"]) > 10
    links = {each["url"]: each["title"] for each in dashboard["links"]}
    assert links == {f"/d/{uid}": each["title"] for uid, each in DASHBOARDS.items() if uid != name}
    source, instance = dashboard["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("source", "datasource", "prometheus")
    assert (instance["name"], instance["type"], instance["allValue"]) == ("instance", "query", ".*")
    assert named_series(instance["query"]["query"]) <= exported_series()
    assert [panel["id"] for panel in dashboard["panels"]] == list(range(1, len(dashboard["panels"]) + 1))
    assert dashboard["panels"][0]["type"] == "row"


def test_the_dashboards_are_these() -> None:
    known = {"shardmesh-cluster", "shardmesh-datasets", "shardmesh-nodes", "shardmesh-training"}
    assert set(DASHBOARDS) == known, "a uid that is gone is a dead link in somebody's Grafana"


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_is_one_question_with_its_unit(panel: dict[str, Any]) -> None:
    source = {"type": "prometheus", "uid": "${source}"}
    assert panel["type"] in ("timeseries", "stat", "table")
    assert panel["title"]
    assert len(panel["description"]) > 10
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["datasource"] == source
    assert [each["refId"] for each in panel["targets"]] == list("ABCDEFGH"[: len(panel["targets"])])
    for target in panel["targets"]:
        assert target["datasource"] == source
        assert target["range"] is (panel["type"] == "timeseries")
        assert target["instant"] is not target["range"]
        assert (target.get("format") == "table") is (panel["type"] == "table")
        assert target["legendFormat"]
        assert set(re.findall(r"\$\w+", target["expr"])) <= {"$instance", "$__rate_interval"}


def test_dashboards_name_only_metrics_that_exist() -> None:
    known = exported_series() | {each["record"] for each in RECORDINGS}
    used = {expr: named_series(expr) for expr in (*EXPRESSIONS, *MAY_BE_EMPTY)}
    unknown = {expr: names - known for expr, names in used.items() if names - known}
    assert not unknown
    assert sum(map(bool, used.values())) > 50


def test_panels_do_not_overlap() -> None:
    for dashboard in DASHBOARDS.values():
        taken: set[tuple[int, int]] = set()
        for panel in dashboard["panels"]:
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken, panel["title"]
            assert place["x"] + place["w"] <= COLUMNS
            taken |= cells


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus beside a node that did a little of everything, and a mesh of two."""
    place = tmp_path_factory.mktemp("prometheus")
    rules = place / "rules.yaml"
    rules.write_text(RULES.read_text().replace("interval: 30s", "interval: 1s"))
    with Daemon.start() as daemon, DaemonCluster.start(2) as pair:
        work(daemon.endpoint, daemon.access_key, daemon.secret_key)
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
@pytest.mark.parametrize("record", [each["record"] for each in RECORDINGS])
def test_it_is_recorded(busy: Prometheus, record: str) -> None:
    assert busy.wait(record)
