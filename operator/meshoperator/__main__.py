"""Entry point: `python -m meshoperator` runs the operator until SIGTERM or SIGINT.

Law: the process ends when its event loop has ended all work; it never exits by force. Status 1: a part
of the operator failed, and the process has to be restarted.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import textwrap
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from aiohttp import web
from lightkube import ConfigError, KubeConfig

from meshoperator.listen_socket import listen
from meshoperator.manager import Manager, holder
from meshoperator.settings import OperatorSettings, variables
from meshwire.http_values.mesh_headers import RELEASE
from meshwire.phrases import open_files_message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

_log = logging.getLogger("meshoperator")


_HELP = """Reconcile MeshCluster, Dataset and the other kinds of shardmesh.io.

In a pod, the operator uses the pod's service account; elsewhere it uses the file that KUBECONFIG names, or
~/.kube/config. It runs until SIGTERM or SIGINT. The Helm chart installs it: docs/kubernetes.md."""


def _help_of_settings() -> str:
    lines = ["environment variables, all optional, with their defaults:"]
    margin = " " * 6
    for each in variables():
        text = f"{each.text} [{each.default}]"
        lines += [f"  {each.name}", textwrap.fill(text, 100, initial_indent=margin, subsequent_indent=margin)]
    return "\n".join(lines)


def main() -> None:
    """Run the operator with the settings in the environment."""
    try:
        sys.exit(_run())
    except Exception as error:
        if (why := open_files_message(error)) is None:
            raise
        sys.exit(f"meshoperator: {why}")


def _run() -> int:
    parser = argparse.ArgumentParser(
        "meshoperator",
        description=_HELP,
        epilog=_help_of_settings(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"meshoperator {RELEASE}")
    _, others = parser.parse_known_args()
    try:
        settings = with_family(OperatorSettings.from_environment(os.environ), os.environ)
    except ValueError as error:
        sys.exit(f"invalid setting: {error}")
    logging.basicConfig(format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", level=logging.WARNING)
    _log.setLevel(settings.log_level.upper())
    try:
        cluster = KubeConfig.from_env()
    except ConfigError as error:
        sys.exit(f"no cluster: not in a pod, and {error}; set KUBECONFIG to the path of a kubeconfig file")
    return asyncio.run(run_operator(with_arguments(settings, others), cluster))


def with_family(settings: OperatorSettings, environ: Mapping[str, str]) -> OperatorSettings:
    """Read the first family of the cluster off the address of its API's Service, which kubelets set in every
    pod."""
    return replace(settings, cluster_ipv6=":" in environ.get("KUBERNETES_SERVICE_HOST", ""))


def with_arguments(settings: OperatorSettings, arguments: Sequence[str]) -> OperatorSettings:
    """Read the arguments with which charts up to 0.1.0 started `kopf run`; for one release."""
    if not arguments:
        return settings
    _log.warning(
        "arguments are ignored: %s; MESH_OPERATOR_ variables replace them, upgrade the chart", arguments
    )
    for each in arguments:
        name, _, url = each.partition("=")
        if name == "--liveness" and settings.health is None:
            parts = urlsplit(url)
            settings = replace(settings, health=(parts.hostname or "", parts.port or 0))
    return settings


async def run_operator(settings: OperatorSettings, cluster: KubeConfig) -> int:
    """Run until a signal or a failed part ends it; return the exit status."""
    end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end.set)
    manager = Manager(settings, cluster, holder(), end.set)
    async with serve_health(manager, settings.health):
        manager.start()
        await end.wait()
        _log.info("stopping the operator")
        await manager.stop()
    return int(manager.failed)


@asynccontextmanager
async def serve_health(manager: Manager, address: tuple[str, int] | None) -> AsyncIterator[None]:
    """Serve `/healthz`: 200 while the event loop runs, with whether this operator leads."""

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"leading": manager.leading.leads.is_set()})

    app = web.Application()
    app.router.add_get("/healthz", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        if address is not None:
            await web.SockSite(runner, listen(*address)).start()
        yield
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    main()
