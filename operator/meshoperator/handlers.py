"""Entry point of `kopf run -m meshoperator.handlers`: kopf watches, `manager` does the work.

Law: handlers decide nothing and write nothing into resources; they only report an event.
"""

from __future__ import annotations

import logging
import os
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

import kopf
from lightkube import KubeConfig

from meshoperator.forced_exit import exit_within
from meshoperator.manager import Manager, holder
from meshoperator.resources import GROUP, VERSION
from meshoperator.settings import OperatorSettings

if TYPE_CHECKING:
    from kopf import Body

_SETTINGS = OperatorSettings.of_environment(os.environ)
_PROGRAM: list[Manager] = []


@kopf.on.startup()
async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
    """Begin."""
    logging.getLogger("meshoperator").setLevel(_SETTINGS.log_level.upper())
    for chatty in ("httpx2", "aiohttp.access", "kopf.activities.probe", "kopf.objects"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    settings.posting.enabled = False  # events are ours
    settings.scanning.disabled = True  # no rights to look for new kinds or namespaces are needed
    settings.watching.server_timeout = 240
    end = partial(os.kill, os.getpid(), signal.SIGTERM)  # kopf's way to end in order
    program = Manager(_SETTINGS, KubeConfig.from_env(), holder(), end)
    await program.start()
    _PROGRAM.append(program)


@kopf.on.cleanup()
async def stop(**_: Any) -> None:
    """End."""
    while _PROGRAM:
        await _PROGRAM.pop().stop()
    exit_within()


@kopf.on.probe(id="leading")
async def leading(**_: Any) -> bool:
    """Told by /healthz: whether this operator is the one that acts."""
    return bool(_PROGRAM) and _PROGRAM[0].leading.leads.is_set()


@kopf.on.event(GROUP, VERSION, "meshclusters")
@kopf.on.event(GROUP, VERSION, "meshnodes")
@kopf.on.event(GROUP, VERSION, "meshdatasets")
@kopf.on.event(GROUP, VERSION, "meshloads")
@kopf.on.event(GROUP, VERSION, "meshviews")
async def happened(body: Body, **_: Any) -> None:
    """Something happened to a resource of ours."""
    for program in _PROGRAM:
        program.on_resource_event(dict(body))


if _SETTINGS.reads_nodes:

    @kopf.on.event("", "v1", "nodes")
    async def host_happened(body: Body, type: str | None, **_: Any) -> None:
        """A Kubernetes node came, went, was cordoned, or said that it lives."""
        for program in _PROGRAM:
            program.on_node_event(dict(body), gone=type == "DELETED")
