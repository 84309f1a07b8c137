"""The control store on the Kubernetes API: no etcd of one's own to run there.

A key is an object: a ConfigMap, or a Secret where the topic may hold secrets; versions are resource versions.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from meshd.control.kubernetes.access import own_namespace, server
from meshd.control.kubernetes.api import Api
from meshd.control.kubernetes.store import KubernetesControl

if TYPE_CHECKING:
    from meshd.config import KubernetesAddress
    from meshd.kit.clock import Clock

__all__ = ["KubernetesControl", "open_kubernetes"]


def open_kubernetes(address: KubernetesAddress, clock: Clock) -> KubernetesControl:
    """The store of an address; without a namespace in the pod's own. Raises ControlError."""
    api, namespace = Api(server(os.environ), clock), address.namespace or own_namespace()
    return KubernetesControl(api, namespace, address.name, clock)
