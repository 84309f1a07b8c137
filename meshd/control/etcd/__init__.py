"""The control store on etcd v3, for several nodes."""

from meshd.control.etcd.store import EtcdControl

__all__ = ["EtcdControl"]
