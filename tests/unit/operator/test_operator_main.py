"""The operator as a process: it answers `/healthz`, and ends by itself whatever its API server does."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import threading
import time
import urllib.request
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from lightkube import KubeConfig

from meshoperator.__main__ import with_arguments, with_family
from meshoperator.controllers.observed_state import Observer
from meshoperator.listen_socket import listen, usable_host
from meshoperator.manager import Manager
from meshoperator.planners.manifests import daemon_settings
from meshoperator.settings import OperatorSettings, variables
from tests.support.interpreters import launch_python, python

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshoperator.cluster_model import Cluster
    from tests.support.fork_server import Process

POOL = {"name": "s", "replicas": 1, "tiers": [{"name": "d", "class": "ssd", "hostPath": "/mnt/d"}]}


def silent(_: socket.socket) -> None:
    """Never answers."""


def resetting(connection: socket.socket) -> None:
    connection.close()


def failing(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n")


def hanging(connection: socket.socket) -> None:
    """Begins every answer and never ends it."""
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")


@pytest.mark.parametrize("serve", [silent, resetting, failing, hanging])
def test_it_ends_by_itself_whatever_the_api_server_does(
    tmp_path: Path, serve: Callable[[socket.socket], None]
) -> None:
    accepted = list[socket.socket]()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run() -> None:
            try:
                while True:
                    accepted.append(server.accept()[0])
                    serve(accepted[-1])
            except OSError:
                return

        thread = threading.Thread(target=run)
        thread.start()
        health = _free_port()
        operator = _start(tmp_path, server.getsockname()[1], health)
        try:
            assert _healthy(health) == {"leading": False}
            _until(lambda: len(accepted) > 7)  # a watch for each kind, and the Lease
            operator.terminate()
            assert operator.wait(30) == 0
        finally:
            operator.kill()
            operator.wait(30)
            server.shutdown(socket.SHUT_RDWR)
            thread.join(30)
            for each in accepted:
                each.close()


def test_a_part_that_fails_ends_it_with_an_error(tmp_path: Path) -> None:
    """An operator that lacks a part must not go on: a metrics port that is taken."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        operator = _start(tmp_path, port, _free_port(), MESH_OPERATOR_METRICS=f"127.0.0.1:{port}")
        assert operator.wait(30) == 1


def test_it_answers_by_both_families(tmp_path: Path) -> None:
    """As with the chart's values, health by one server, metrics by another."""
    health, figures = _free_port(), _free_port()
    addresses = {"MESH_OPERATOR_HEALTH": f"[::]:{health}", "MESH_OPERATOR_METRICS": f"[::]:{figures}"}
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        operator = _start(tmp_path, nobody.getsockname()[1], health, **addresses)
        try:
            for host in ("127.0.0.1", "[::1]"):
                assert _healthy(health, host) == {"leading": False}
                _until(partial(_answers, f"http://{host}:{figures}/metrics"))
        finally:
            operator.kill()
            operator.wait(30)


@pytest.mark.parametrize(("host", "families"), [("::", 2), ("::1", 1), ("127.0.0.1", 1)])
def test_sockets_take_the_families_of_their_address(host: str, families: int) -> None:
    def takes(address: str) -> bool:
        with closing(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)) as sock:
            sock.settimeout(20)
            if sock.connect_ex((address, port)):
                return False
            with suppress(TimeoutError):  # else another program has the port at this address
                server.accept()[0].close()
                return True
            return False

    with closing(listen(host, 0)) as server:
        server.settimeout(2)
        port = server.getsockname()[1]
        assert sum(map(takes, ("127.0.0.1", "::1"))) == families


def test_without_ipv6_every_address_is_one_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chart's `[::]` is for every cluster, whatever its nodes have."""
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with closing(listen("::", 0)) as server:
        assert server.family == socket.AF_INET
    assert [usable_host(host) for host in ("::", "::1", "127.0.0.1")] == ["0.0.0.0", "::1", "127.0.0.1"]


def test_arguments_of_earlier_charts_are_understood(caplog: pytest.LogCaptureFixture) -> None:
    arguments = ["run", "--module=meshoperator.handlers", "--liveness=http://0.0.0.0:8080/healthz"]
    assert with_arguments(OperatorSettings(), arguments).health == ("0.0.0.0", 8080)
    assert "upgrade the chart" in caplog.text
    told = OperatorSettings.from_environment({"MESH_OPERATOR_HEALTH": "127.0.0.1:1"})
    assert with_arguments(told, arguments).health == ("127.0.0.1", 1)
    assert OperatorSettings.from_environment({"MESH_OPERATOR_HEALTH": "[::]:1"}).health == ("::", 1)


@pytest.mark.parametrize(
    ("api", "listens"),
    [
        ("10.0.0.1", "0.0.0.0:9000"),
        ("fd00::1", "[::]:9000"),
        ("[fd00::1]", "[::]:9000"),
        ("", "0.0.0.0:9000"),
    ],
)
def test_daemons_listen_on_ipv6_where_it_is_the_clusters_first_family(api: str, listens: str) -> None:
    """Its pods may have no other address, at which kubelets could probe them."""

    async def seen() -> Cluster:
        settings = with_family(OperatorSettings(reads_nodes=False), {"KUBERNETES_SERVICE_HOST": api})
        manager = Manager(settings, KubeConfig.from_dict(_config(1)), "o", lambda: None)
        metadata = {"name": "m", "namespace": "meshes", "uid": "uid"}
        spec = {"image": "i:1", "nodePools": [POOL]}
        observer = Observer(manager.kube, settings, str)
        return await observer.load_cluster({"metadata": metadata, "spec": spec})

    assert daemon_settings(asyncio.run(seen()))["listen"] == listens


@pytest.mark.parametrize(("given", "namespace"), [("", "ns"), ("other", "other")])
def test_policies_admit_an_operator_without_a_namespace_for_its_lease(given: str, namespace: str) -> None:
    """Its pod is in that of the kubeconfig, as in a pod in its own."""

    async def seen() -> Cluster:
        settings = OperatorSettings(lease_namespace=given, pod_name="o", pod_uid="u", reads_nodes=False)
        manager = Manager(settings, KubeConfig.from_dict(_config(1)), "o", lambda: None)
        observer = Observer(manager.kube, manager.settings, str)
        metadata = {"name": "m", "namespace": "meshes", "uid": "uid"}
        return await observer.load_cluster(
            {"metadata": metadata, "spec": {"image": "i:1", "nodePools": [POOL]}}
        )

    assert asyncio.run(seen()).operator_namespace == namespace


def test_labels_of_the_operators_pods() -> None:
    given = {"MESH_OPERATOR_POD_LABELS": "app.kubernetes.io/instance=a,x="}
    assert OperatorSettings.from_environment(given).pod_labels == (
        ("app.kubernetes.io/instance", "a"),
        ("x", ""),
    )
    for wrong in (",", "x", "=y", "a=b,c"):
        with pytest.raises(ValueError, match=r"MESH_OPERATOR_POD_LABELS is .*; write NAME=VALUE"):
            OperatorSettings.from_environment({"MESH_OPERATOR_POD_LABELS": wrong})


def _config(api: int) -> dict[str, Any]:
    return {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "ns"}}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{api}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }


def _start(place: Path, api: int, health: int, **more: str) -> Process:
    (place / "kubeconfig").write_text(json.dumps(_config(api)))
    own = {"KUBECONFIG": str(place / "kubeconfig"), "MESH_OPERATOR_HEALTH": f"127.0.0.1:{health}"}
    with (place / "log").open("wb") as log:
        return launch_python(["-m", "meshoperator"], os.environ | own | more, log, Path.cwd())


def _free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        return int(free.getsockname()[1])


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return b"mesh_operator_" in answer.read()
    except OSError:
        return False


def _healthy(port: int, host: str = "127.0.0.1") -> object:
    answers = list[object]()

    def ask() -> bool:
        try:
            with urllib.request.urlopen(f"http://{host}:{port}/healthz", timeout=5) as answer:
                answers.append(json.load(answer))
        except OSError:
            return False
        return True

    _until(ask)
    return answers[-1]


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def _main(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python(), "-m", "meshoperator", *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_its_help_names_every_variable_that_it_reads() -> None:
    done, read = _main("--help"), set[str]()

    class Recorder(dict[str, str]):
        def get(self, name: str, default: Any = None) -> Any:
            read.add(name)
            return default

    OperatorSettings.from_environment(Recorder())
    assert done.returncode == 0, done.stderr
    assert read == {line.strip() for line in done.stdout.splitlines() if "MESH_OPERATOR_" in line}


def test_its_help_explains_every_variable_and_shows_its_default() -> None:
    told = " ".join(_main("--help").stdout.split())
    for variable in variables():
        assert re.fullmatch(r"[A-Z][^.]*\w.*\.", variable.text), f"{variable.name} has no sentence"
        assert f"{variable.name} {variable.text} [{variable.default}]" in told
        if variable.name.endswith("_SECONDS"):
            assert variable.default.endswith(" seconds"), f"{variable.name}: the default has no unit"


def test_the_default_that_is_shown_is_the_one_that_applies() -> None:
    for variable in variables():
        default = getattr(OperatorSettings(), variable.field)
        if isinstance(default, str) and default:
            assert variable.default == default
        elif isinstance(default, int | float) and not isinstance(default, bool):
            assert float(variable.default.split()[0]) == default


def test_the_docs_list_the_same_variables_with_the_same_texts() -> None:
    page = (Path(__file__).parents[3] / "docs" / "kubernetes.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `MESH_OPERATOR_")]
    assert rows == [f"| `{each.name}` | {each.default} | {each.text} |" for each in variables()]


def test_without_a_cluster_it_says_what_to_set(tmp_path: Path) -> None:
    done = _main(KUBECONFIG=str(tmp_path / "none"), KUBERNETES_SERVICE_HOST="")
    assert done.returncode == 1
    assert done.stderr.startswith("no cluster: ")
    assert "KUBECONFIG" in done.stderr


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("RESYNC_SECONDS", "soon"),
        ("MOVE_BYTES_PER_SECOND", "1.5"),
        ("HEALTH", "0.0.0.0:http"),
        ("METRICS", "0.0.0.0:90900"),
        ("LOG_LEVEL", "loud"),
    ],
)
def test_a_wrong_value_is_shown_with_its_variable(variable: str, value: str) -> None:
    name = f"MESH_OPERATOR_{variable}"
    with pytest.raises(ValueError, match=f"{name} is '{value}'; write "):
        OperatorSettings.from_environment({name: value})
