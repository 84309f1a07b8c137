"""`meshd dev`: three nodes and an etcd by one command, ended by one Ctrl-C."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import boto3
import psutil
import pytest

from tests.support.console_client import ConsoleClient
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from pathlib import Path

require_etcd()


def _until_ready(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith("mesh ready"):
            return said
    raise AssertionError(said)


def _look_at_the_console(endpoints: list[str], keys: dict[str, str]) -> None:
    """Every node has it, forwards what its pages request, and knows what the others do."""
    for endpoint in endpoints:
        page = ConsoleClient(endpoint, keys["AWS_ACCESS_KEY_ID"], keys["AWS_SECRET_ACCESS_KEY"])
        assert page.sign_in().status == 200
        for number in range(3):
            assert page.api("GET", f"/bucket-0/of-{number}").body == b"text"
            answer = page.send("GET", f"/-/console/download/bucket-0/of-{number}")
            assert answer.headers["content-disposition"].startswith("attachment;")
            answer = page.send("GET", f"/bucket-0/of-{number}", headers={"Accept": "text/html"})
            assert answer.headers["content-security-policy"].startswith("sandbox ")
        activity = page.json("GET", "/-/activity?history=1")
        assert (sorted(activity["nodes"]), activity["silent"]) == (["n1", "n2", "n3"], [])


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_three_nodes_serve_and_end_together(tmp_path: Path, how: signal.Signals) -> None:
    command = [sys.executable, "-m", "meshd", "dev", "--port", "0", "--data-dir", str(tmp_path / "mesh")]
    with subprocess.Popen(
        [*command, "--", "--workers", "1", "--transform-workers", "1"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            said = _until_ready(process)
            endpoints = re.findall(r"^n\d ready endpoint=(\S+)", said, re.MULTILINE)
            keys = dict(re.findall(r"(AWS_[A-Z_]*KEY[A-Z_]*)=(\S+)", said))
            for number, endpoint in enumerate(endpoints):
                client = boto3.client(
                    "s3",
                    endpoint_url=endpoint,
                    region_name="us-east-1",
                    aws_access_key_id=keys["AWS_ACCESS_KEY_ID"],
                    aws_secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
                )
                client.create_bucket(Bucket=f"bucket-{number}")
                assert len(client.list_buckets()["Buckets"]) == number + 1
                client.put_object(Bucket="bucket-0", Key=f"of-{number}", Body=b"text")
            if how is signal.SIGINT:
                assert f"the web console with the same keys: {endpoints[0]}/console\n" in said
                _look_at_the_console(endpoints, keys)
            children = psutil.Process(process.pid).children(recursive=True)
            assert len(endpoints) == 3
            if how is signal.SIGTERM:
                [etcd] = [child for child in children if child.name() == "etcd"]
                etcd.kill()
                assert process.stdout is not None
                assert "etcd ended (-9), see " in process.stdout.readline()
                assert client.get_object(Bucket="bucket-0", Key="of-0")["Body"].read() == b"text"
                psutil.Process(int(re.findall(r"^n1 ready .*pid=(\d+)", said, re.MULTILINE)[0])).kill()
                assert "n1 ended (-9). To start it again:" in process.stdout.readline()
                again = process.stdout.readline().split()
                assert again[:2] == ["meshd", "serve"]
                assert again.count("--workers") == 1
                assert again.count("--transform-workers") == 1
        finally:
            process.send_signal(how)
            process.wait(60)
    assert process.returncode == 0
    _, alive = psutil.wait_procs(children, 10)
    assert not alive, "nothing of it outlives the command"


def test_a_taken_port_is_told_by_the_flag_that_dev_has(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "meshd", "dev", "--nodes", "1", "--port", port]
        done = subprocess.run(
            [*command, "--data-dir", str(tmp_path)], capture_output=True, text=True, check=False, timeout=120
        )
    assert done.returncode == 1
    assert "n1 did not start" in done.stderr
    assert "choose another --port" in done.stderr
