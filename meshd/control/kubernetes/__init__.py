"""The control store on the Kubernetes API: no etcd of one's own to run there.

A key is an object: a ConfigMap, or a Secret where the topic may hold secrets; versions are resource versions.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from meshd.control.interface import ControlError
from meshd.control.kubernetes.access import own_namespace, server
from meshd.control.kubernetes.api import Api
from meshd.control.kubernetes.store import KubernetesControl

if TYPE_CHECKING:
    from meshd.kit.clock import Clock

__all__ = ["KubernetesControl", "open_kubernetes"]

_URL = re.compile(
    r"kubernetes://(?P<namespace>[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?/(?P<name>[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?)"
)


def open_kubernetes(url: str, clock: Clock) -> KubernetesControl:
    """The store of `kubernetes://NAMESPACE/NAME`; without NAMESPACE in the pod's own. Raises ControlError."""
    found = _URL.fullmatch(url)
    if found is None:
        raise ControlError(
            f"{url!r} is no kubernetes://NAMESPACE/NAME (lower case, digits, dashes; NAME: at most 40)"
        )
    return KubernetesControl(
        Api(server(os.environ), clock), found["namespace"] or own_namespace(), found["name"], clock
    )
