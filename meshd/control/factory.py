"""Factory of the control store: opens the engine that the settings name."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from meshd.config import KubernetesAddress
from meshd.control.control_api import ControlError
from meshd.control.embedded import EmbeddedControl
from meshd.control.etcd import EtcdControl
from meshd.control.etcd.gateway import EtcdMember, Gateway
from meshd.control.kubernetes.kubernetes_control import open_kubernetes

if TYPE_CHECKING:
    from meshd.config import ControlAddress, NodeSettings
    from meshd.control.control_api import ControlStore
    from meshd.util.clock import Clock


def open_control(settings: NodeSettings, clock: Clock) -> ControlStore:
    """Opens the control store, once per process and after forking. Raises ControlError."""
    address = settings.cluster.control
    if address is None:
        return EmbeddedControl(settings.control_dir, clock)
    if isinstance(address, KubernetesAddress):
        return open_kubernetes(address, clock)
    members = tuple(EtcdMember(host, port) for host, port in address.members)
    gateway = Gateway(members, clock, tls=_tls(address), login=address.login)
    return EtcdControl(gateway, address.prefix)


def _tls(address: ControlAddress) -> ssl.SSLContext | None:
    if not address.tls:
        return None
    try:
        return ssl.create_default_context(cafile=str(address.ca) if address.ca else None)
    except (OSError, ssl.SSLError) as error:
        raise ControlError(f"control-ca: cannot read the certificates in {address.ca}: {error}") from None
