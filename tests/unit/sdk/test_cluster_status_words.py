"""The first lines of `mesh cluster status`: what is wrong with the mesh, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from click.testing import CliRunner

from meshsdk.admin import cluster_admin
from meshsdk.cli.cluster import cluster
from meshsdk.cli.cluster_status import scrub_percent, status_lines

if TYPE_CHECKING:
    import pytest


def node(name: str, state: str = "up", *, only_copies: bool = False) -> dict[str, Any]:
    return {
        "id": name,
        "state": state,
        "zone": "",
        "roles": ["store"],
        "slots": 10,
        "slots_wanted": 10,
        "endpoint": f"http://{name}:9000",
        "leaving": False,
        "empty": False,
        "drain": None,
        "only_copies": only_copies,
        "lease": state == "up",
        "work": None,
        "scrub": None,
    }


def said(
    *nodes: dict[str, Any],
    moving: bool = False,
    clocks_agree: bool = True,
    control: str = "reached",
    debt: int = 0,
    **more: float,
) -> list[str]:
    movement = {"takers": 0, "bytes_total": 0, "bytes_moved": 0, "eta_seconds": 0}
    found = {
        "node": "n1",
        "version": 9,
        "copies": 2,
        "nodes": list(nodes),
        "moving": moving,
        "movement": movement,
        "control": control,
        "debt": debt,
        "clocks_agree": clocks_agree,
        **more,
    }
    return list(status_lines(found))


def test_a_mesh_that_is_well_says_so() -> None:
    assert said(node("n1"), node("n2"))[0] == "map 9, 2 nodes, 2 copies: all data is where it belongs"


def test_a_node_that_is_away_comes_first() -> None:
    first, second, *_ = said(node("n1", only_copies=True), node("n2", "away"), moving=True)
    assert first == "map 9, 2 nodes, 2 copies: n2 does not answer; data is moving"
    assert second.startswith("all data can be read and written; restart the nodes that are away")
    assert "mesh cluster lost n2" in second


def test_a_node_that_cannot_be_marked_away_is_told_all_the_same() -> None:
    n1, n2 = node("n1") | {"lease": None}, node("n2") | {"lease": None, "silent": True}
    lines = said(n1, n2, control="etcd takes no writes (alarm:NOSPACE)")
    assert lines[0].endswith(": n2 does not answer")
    assert lines[1] == (
        "the control store is unreachable (writes of data that n2 owns wait until it or the control store is "
        "back): "
        "etcd takes no writes (alarm:NOSPACE)"
    )
    assert lines[-1].endswith("did not answer within a second")


def test_a_node_that_renews_its_lease_may_be_slow_once() -> None:
    lines = said(node("n1"), node("n2") | {"silent": True})
    assert lines[0].endswith(": all data is where it belongs")
    assert lines[-1].endswith("did not answer within a second")
    lines = said(node("n1"), node("n2") | {"silent": True, "lease": False})
    assert lines[0].endswith(": n2 does not answer")


def test_a_node_that_is_not_there_is_told_before_its_lease_ends() -> None:
    gone = node("n2") | {"silent": True, "absent": True}
    lines = said(node("n1"), gone, lease_seconds=5)
    assert lines[0].endswith(": n2 does not answer")
    assert lines[-1].endswith("no daemon listens there; it is marked away within 5 s")
    lines = said(node("n1"), gone | {"lease": None}, control="etcd rejects writes", lease_seconds=5)
    assert lines[-1].endswith("no daemon listens there")  # nobody can mark it


def test_it_is_told_when_what_was_there_is_copied() -> None:
    _, second, *_ = said(node("n1"), node("n2", "away"), down_after_seconds=900.0)
    assert "(after 15 min away, the data of a node is copied to others)" in second


def test_without_the_control_store_nobody_knows_where_data_belongs_now() -> None:
    first, second, *_ = said(node("n1"), node("n2"), control="is etcd running?")
    assert first.endswith(": all data was where it belongs when the control store was last reached")
    assert second.startswith("the control store is unreachable (data is still served)")


def test_data_with_too_few_copies_is_never_where_it_belongs() -> None:
    assert said(node("n1"), debt=3)[0].endswith(", 2 copies: 3 objects with fewer copies than required")


def test_data_that_cannot_be_had_is_never_where_it_belongs() -> None:
    away = [node(name, "away", only_copies=True) for name in ("n2", "n3")]
    first, second, *_ = said(node("n1", only_copies=True), *away)
    assert first.endswith(": n2, n3 do not answer")
    assert second.startswith("some data cannot be read or written: restart n2, n3, the last to leave first")
    assert "permanently gives up" in second


def disk(full: int, *, serves: bool = True) -> dict[str, Any]:
    return {"path": f"/disk{full}", "serves": serves, "why": "" if serves else "is lost", "full": full}


def holding(name: str, *disks: dict[str, Any]) -> dict[str, Any]:
    scrub = {"running": False, "quarantined": 0, "compared": True, "disks": list(disks)}
    return node(name) | {"scrub": scrub}


def test_a_node_without_room_is_told_first() -> None:
    first, *rest = said(node("n1"), holding("n2", disk(98), disk(40, serves=False), disk(99)))
    assert first.endswith(": n2 is full; n2 has 1 disk out of service")
    assert "full: rejects writes; delete objects, or add a disk or a node" in rest[-1]
    assert said(holding("n2", disk(99), disk(97)))[0].endswith(": all data is where it belongs")
    assert not any("full:" in line for line in said(holding("n2", disk(99, serves=False))))


def test_a_small_disk_is_full_before_97_percent_and_a_large_one_after_it() -> None:
    small, large = disk(96) | {"refuses_writes": True}, disk(98) | {"refuses_writes": False}
    lines = said(node("n1"), holding("n2", small, disk(95) | {"refuses_writes": True}))
    assert lines[0].endswith(": n2 is full")
    assert "full: rejects writes" in lines[-1]
    lines = said(node("n1"), holding("n2", large))
    assert lines[0].endswith(": n2 is nearly full")
    assert "nearly full: delete objects" in lines[-1]
    assert said(holding("n2", small, large))[0].endswith(": all data is where it belongs")
    index = disk(99) | {"why": "holds the index and is full: … (ShardmeshIndexFull)"}
    assert said(holding("n2", large | {"full": 9}, index))[0].endswith(": the index of n2 is full")


def test_a_disk_out_of_service_is_told_first() -> None:
    first, *_ = said(node("n1"), holding("n2", disk(9), disk(8, serves=False)))
    assert first.endswith(": n2 has 1 disk out of service")


def test_a_node_whose_disk_hangs_is_not_to_be_restarted() -> None:
    silent = disk(9) | {"why": "has not answered since 3:00 (ShardmeshDiskHangs)"}
    hanging = holding("n2", silent) | {"state": "away"}
    first, second, *rest = said(node("n1"), hanging)
    assert first.endswith(": a disk of n2 hangs")
    assert "restart the nodes that are away" not in second
    assert "n2 left because a disk hangs: it returns by itself when the disk answers" in second
    assert "has left its share to the others until its disk answers; /disk9 has not answered" in rest[-1]
    _, second, *_ = said(hanging, node("n3", "away"))
    assert "; restart the others" in second
    only = hanging | {"only_copies": True}
    _, second, *_ = said(node("n1"), only)
    assert "some data cannot be read or written: n2 left because a disk hangs" in second
    assert "restart n2" not in second
    _, second, *_ = said(only, node("n3", "away", only_copies=True))
    assert "; restart n3, the last to leave first; `mesh cluster lost" in second
    gone = hanging | {"lease": False}  # nothing runs there
    first, second, *_ = said(node("n1"), gone)
    assert "n2 does not answer" in first
    assert "restart the nodes that are away" in second


def test_damage_that_may_have_no_other_copy_is_not_only_waited_for() -> None:
    damaged = holding("n1", disk(9))
    damaged["scrub"]["quarantined"] = 2
    told = "2 damaged or lost objects to be restored; if some stay, no other running node has them"
    assert f"{told} (ShardmeshDamagedData)" in said(damaged)[-1]


def test_a_certificate_that_is_refused_is_told_first() -> None:
    lines = said(node("n1"), node("n2") | {"refused": "its certificate is refused (expired): renew it"})
    assert lines[0].endswith(": n2 cannot be reached by other nodes")
    assert "cannot be reached by other nodes: its certificate is refused (expired)" in lines[-1]


def test_a_clock_that_is_wrong_is_told_first_and_by_how_much() -> None:
    lines = said(node("n1") | {"clock_ahead": 0}, node("n2") | {"clock_ahead": -412}, node("n3", "away"))
    assert lines[0].endswith(": n3 does not answer; n2's clock is 7 min behind")
    n2 = next(line for line in lines if line.startswith("n2"))
    assert n2.endswith(
        "its clock is 7 min behind: set it (chronyc makestep); beyond 5 min nodes reject each other's "
        "requests (ShardmeshClocksDiffer)"
    )
    assert not any("clock" in line for line in said(node("n1") | {"clock_ahead": 59}))


def test_of_two_clocks_that_differ_none_is_called_wrong() -> None:
    nodes = node("n1") | {"clock_ahead": 0}, node("n2") | {"clock_ahead": 95}
    lines = said(*nodes, clocks_agree=False)
    assert "the clocks of n1, n2 differ by 95 s" in lines[0]
    assert "its clock is 95 s ahead of n1's: set the one whose `date -u` is wrong" in lines[-1]


def test_a_scrub_of_every_node_names_those_that_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node("n1"), node("n2", "away"), node("n3", "down")]
    monkeypatch.setattr(cluster_admin, "cluster_status", lambda _: {"nodes": nodes})
    monkeypatch.setattr(cluster_admin, "change_node", lambda *_: {"asked": 1})
    env = {"MESH_ENDPOINT": "http://127.0.0.1:1", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    told = CliRunner().invoke(cluster, ["scrub"], env=env)
    assert told.stderr == "not scrubbed, because they do not answer: n2, n3\n"
    assert "scrub started on n1;" in told.stdout
    assert CliRunner().invoke(cluster, ["scrub", "n1"], env=env).stderr == ""


def test_a_scrub_that_was_asked_for_is_not_told_as_the_one_before() -> None:
    told = {"asked": 3, "running": False, "compared": True, "bytes": 5, "total": 10}
    assert scrub_percent(told, 4) == "waiting"
    assert scrub_percent(told, 3) == "done"
    assert scrub_percent(told | {"asked": 4, "running": True, "compared": False}, 4) == "50%"
