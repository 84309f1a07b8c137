"""What a Prometheus says about alerts of the real cluster: with their `for:`, and *at once*, by a copy of the
rules without it and with short windows, since the failures here last seconds."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml

from tests.e2e.cluster_client import EndToEndError
from tests.monitoring.shipped_files import RULES

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.stage import Stage

SHORTEST = 30  # seconds: six scrapes
SHRUNK = 60
"""A minute of a window of the rules is a second of the copy's: half an hour without an upload is 30 s, three
different hours are three different minutes. A day has six hours there, so that what lasts for one ends."""
_UNITS = {"m": 60, "h": 3600, "d": 6 * 3600}
_WINDOW = re.compile(r"\[(\d+)([mhd])(?::(\d+)([mhd]))?\]")


def rules_at_once() -> dict[str, Any]:
    """Return the alerts without their `for:`, with short windows, and with the label `at_once`."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    rules = [
        {key: value for key, value in rule.items() if key != "for"}
        | {"labels": {"at_once": "yes"}, "expr": shortened(rule["expr"])}
        for group in groups
        for rule in group["rules"]
        if "alert" in rule
    ]
    return {"groups": [{"name": "at-once", "rules": rules}]}


def shortened(expr: str) -> str:
    """Return an expression whose windows of minutes are seconds long. `predict_linear` keeps its window: it
    needs as much of the past as there is."""

    def seconds(number: str, unit: str) -> str:
        return f"{max(SHORTEST, int(number) * _UNITS[unit] // SHRUNK)}s"

    def short(found: re.Match[str]) -> str:
        if expr[: found.start()].rpartition("(")[0].endswith("predict_linear"):
            return found[0]
        step = f":{seconds(found[3], found[4])}" if found[3] else ""
        return f"[{seconds(found[1], found[2])}{step}]"

    return _WINDOW.sub(short, expr)


def until_fire(
    stage: Stage,
    names: set[str],
    told: dict[str, Any],
    again: Callable[[], object] = int,
    patience: float = 180.0,
) -> None:
    """Do something `again` until these alerts have fired, at once. Raises EndToEndError."""
    seen = set[str]()

    def fired() -> bool:
        again()
        seen.update(firing(stage))
        return names <= seen

    try:
        stage.cluster.until(fired, f"{', '.join(sorted(names))} fire", patience)
    except EndToEndError as error:
        raise EndToEndError(f"alerts that did not fire: {sorted(names - seen)}\n{error}") from error
    told["alerts"] = ", ".join(sorted(names))


def until_silent(stage: Stage, names: set[str], told: dict[str, Any]) -> None:
    """Wait until none of these alerts fires any more, at once: a recorded rate still does for five minutes.
    Raises EndToEndError."""
    try:
        seconds = stage.cluster.until(lambda: not names & firing(stage), "the alerts end", 420)
    except EndToEndError as error:
        raise EndToEndError(f"alerts that still fire: {sorted(names & firing(stage))}\n{error}") from error
    told["alerts ended after"] = f"{seconds:.0f} s"


def until_fire_for_long(stage: Stage, name: str, told: dict[str, Any], patience: float = 300.0) -> None:
    """Wait until an alert has fired as shipped, with its `for:`. Raises EndToEndError."""
    seconds = stage.cluster.until(lambda: fires(stage, name), f"{name} fires with its `for:`", patience)
    told["with its `for:` after"] = f"{seconds:.0f} s more"


def fires(stage: Stage, alert: str) -> bool:
    """Return whether an alert fires now, with its `for:`."""
    return bool(
        stage.prometheus.query(f'ALERTS{{alertname="Shardmesh{alert}", alertstate="firing", at_once=""}}')
    )


def firing(stage: Stage) -> set[str]:
    """Return the alerts that fire now, at once, without `Shardmesh`."""
    found = stage.prometheus.query('ALERTS{alertstate="firing", at_once="yes"}')
    return {each["metric"]["alertname"].removeprefix("Shardmesh") for each in found}
