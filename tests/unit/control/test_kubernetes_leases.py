"""Leases of Kubernetes while the API server is away, by calls to a server that answers with a Lease."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from meshd.control.control_api import ControlError
from meshd.control.kubernetes.api_client import ApiClient, ApiServer
from meshd.control.kubernetes.kubernetes_control import NAME, KubernetesLeases
from tests.support.manual_clock import ManualClock

LEASE = {
    "metadata": {"annotations": {NAME: "node/n2"}, "resourceVersion": "5"},
    "spec": {"holderIdentity": "n2", "leaseDurationSeconds": 10},
}


class Answers(BaseHTTPRequestHandler):
    """An API server that is overloaded while `away` is set."""

    away = threading.Event()

    def do_GET(self) -> None:
        self.send_response(503 if self.away.is_set() else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"items": [LEASE]}).encode())

    def log_message(self, *_: object) -> None:
        pass


def test_time_without_the_api_does_not_end_a_lease() -> None:
    """When the API answers again, a holder that lives has not renewed yet: it must not be taken for lost."""
    clock = ManualClock()
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever).start()
        api = ApiClient(ApiServer("127.0.0.1", server.server_address[1]), clock, deadline=0.2)
        leases, held = KubernetesLeases(api, "mesh", "mesh", clock), {"node/n2": "n2"}
        try:
            assert leases.lease_holders("node/") == held
            clock.advance(7)
            assert leases.lease_holders("node/") == held
            Answers.away.set()
            for _ in range(2):
                with pytest.raises(ControlError, match="does not answer"):
                    leases.lease_holders("node/")
                clock.advance(60)
            Answers.away.clear()
            assert leases.lease_holders("node/") == held
            clock.advance(2.9)
            assert leases.lease_holders("node/") == held
            clock.advance(0.2)
            assert leases.lease_holders("node/") == {}
        finally:
            api.close()
            server.shutdown()
