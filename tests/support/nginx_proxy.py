"""A real nginx in front of daemons, configured as ingress-nginx does with the example values-ingress.yaml."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import yaml

from meshd.process.local_etcd import reserve_port
from tests.support.bounded_wait import await_true

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.support.certificates import CertificatePair

EXAMPLE: Final = Path(__file__).resolve().parents[2] / "helm" / "examples" / "values-ingress.yaml"
DIRECTIVES: Final = {
    "proxy-body-size": "client_max_body_size",
    "proxy-request-buffering": "proxy_request_buffering",
    "proxy-buffering": "proxy_buffering",
    "proxy-read-timeout": "proxy_read_timeout",
    "proxy-send-timeout": "proxy_send_timeout",
    "proxy-next-upstream": "proxy_next_upstream",
}
"""Annotation of ingress-nginx → the directive that it becomes."""
_PREFIX: Final = "nginx.ingress.kubernetes.io/"
_CONFIG: Final = """daemon off; worker_processes 1; pid {root}/pid; error_log {root}/errors warn; user {user};
events {{ worker_connections 256; }}
http {{
  access_log {root}/requests; client_body_temp_path {root}/bodies; proxy_temp_path {root}/answers;
  fastcgi_temp_path {root}/f; uwsgi_temp_path {root}/u; scgi_temp_path {root}/s;
  underscores_in_headers {underscores};
  upstream service {{ {servers} keepalive 32; }}
  server {{
    listen 127.0.0.1:{port}{listen}
    location / {{
      proxy_pass http://service; proxy_http_version 1.1;
      proxy_set_header Host $http_host; proxy_set_header Connection "";
      {directives}
    }}
  }}
}}
"""
"""What ingress-nginx writes for a host and the path `/`; `Host` goes on as the client sent it."""


@dataclass(frozen=True)
class Proxy:
    """nginx that runs; its files are in `root`."""

    endpoint: str
    root: Path
    pid: int

    def buffered(self) -> set[str]:
        """Return which of "request body" and "response" nginx wrote to a file before it passed it on."""
        said = (self.root / "errors").read_text()
        return {word for word in ("request body", "response") if f"{word} is buffered to a temporary" in said}

    def requests(self) -> int:
        """Return how many requests it has answered."""
        return len((self.root / "requests").read_text().splitlines())

    def peak_memory(self) -> int:
        """Return the most bytes of memory that each of its processes has had, in sum."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return sum(map(_peak, (self.pid, *map(int, children))))


def _peak(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@contextlib.contextmanager
def nginx(
    upstreams: Sequence[str],
    root: Path,
    *,
    tls: CertificatePair | None = None,
    underscores: str = "off",
    without: Sequence[str] = (),
) -> Iterator[Proxy]:
    """Run nginx in front of these HOST:PORT. `tls`: it serves https; `without`: annotations of the example to
    leave out."""
    given = example_annotations()
    lines = [f"{DIRECTIVES[name]} {value};" for name, value in given.items() if name not in without]
    pair = f" ssl; ssl_certificate {tls.cert}; ssl_certificate_key {tls.key};" if tls else ";"
    root.mkdir()
    port = reserve_port()
    (root / "conf").write_text(
        _CONFIG.format(
            root=root,
            port=port,
            listen=pair,
            user="root" if os.geteuid() == 0 else "nobody",
            underscores=underscores,
            servers=" ".join(f"server {each};" for each in upstreams),
            directives=" ".join(lines),
        )
    )
    argv = [shutil.which("nginx") or "nginx", "-p", str(root), "-c", str(root / "conf")]
    with subprocess.Popen([*argv, "-e", str(root / "errors")]) as process:
        try:
            await_true(lambda: (root / "pid").exists() and bool((root / "pid").read_text().strip()))
            yield Proxy(f"{'https' if tls else 'http'}://127.0.0.1:{port}", root, process.pid)
        finally:
            process.terminate()
            process.wait(20)


def example_annotations() -> Mapping[str, str]:
    """Return the annotations of the example, without their prefix."""
    annotations = yaml.safe_load(EXAMPLE.read_text())["ingress"]["annotations"]
    found = {name.removeprefix(_PREFIX): value for name, value in annotations.items()}
    assert found.keys() == DIRECTIVES.keys()
    return found
