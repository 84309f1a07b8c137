"""One mesh of three nodes and one browser for all tests that look at the console."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

import meshsdk as mesh
from meshdemo.photographs import photographs
from tests.support.console_browser import open_browser, running_chromium
from tests.support.console_data import ATTACKS, BROKEN, DOCUMENTS, MANY, png
from tests.support.daemon_cluster import DaemonCluster

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.console_browser import Browser
    from tests.support.daemons import Daemon


@pytest.fixture(scope="package")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonCluster]:
    """n2 has no audit log in a file."""
    logs = tmp_path_factory.mktemp("audit")
    args = ["--console", "on", "--durability", "relaxed", "--transform-workers", "1"]
    args += ["--console-grafana", "http://127.0.0.1:1/grafana"]
    own: dict[str, tuple[str, ...]] = {
        node: ("--audit-log", str(logs / node), "--zone", "z1") for node in ("n1", "n3")
    }
    own["n2"] = ("--zone", "z2")
    with closing(DaemonCluster.start(3, args=args, own=own)) as running:
        n1 = running["n1"]
        with closing(n1.client()) as s3:
            _fill(s3)
        client = mesh.connect(
            n1.endpoint, access_key=n1.access_key, secret_key=n1.secret_key, deadline=300
        )  # under load, nodes may take each other for away
        with client:
            client.put_many("many", [(f"{number:07}", b"") for number in range(MANY)])
        yield running
        assert "Traceback" not in running.output()


def _fill(s3: Any) -> None:
    for bucket in ("photos", "many", "hostile", "private"):
        s3.create_bucket(Bucket=bucket)
    for photograph in photographs(32):
        s3.put_object(Bucket="photos", Key=f"train/{photograph.name}", Body=photograph.jpeg)
    for number, attack in enumerate(ATTACKS):
        text = f"{attack}/{attack}.txt" if number % 2 else f"{attack}.txt"
        s3.put_object(Bucket="hostile", Key=f"keys/{text}", Body=attack.encode(), ContentType="text/html")
        s3.put_object(
            Bucket="hostile", Key=f"classes/{attack.replace('/', '')}/{number}.png", Body=png(number)
        )
    s3.put_object(Bucket="hostile", Key=f"classes/{BROKEN}/broken.png", Body=b"no picture")
    for name, (body, kind) in DOCUMENTS.items():
        s3.put_object(
            Bucket="hostile",
            Key=f"documents/{name}",
            Body=body,
            ContentType=kind,
            Metadata={"note": "<img src=x onerror=alert(15)>"},
        )


@pytest.fixture(scope="package")
def daemon(nodes: DaemonCluster) -> Daemon:
    """The node whose console is looked at."""
    return nodes["n1"]


@pytest.fixture(scope="package")
def chromium() -> Iterator[Any]:
    with running_chromium() as running:
        yield running


@pytest.fixture(scope="package")
def browser(chromium: Any, daemon: Daemon) -> Iterator[Browser]:
    """Signed in as root."""
    with open_browser(
        chromium, daemon, viewport={"width": 1280, "height": 900}, accept_downloads=True
    ) as opened:
        opened.sign_in(daemon.access_key, daemon.secret_key)
        yield opened
