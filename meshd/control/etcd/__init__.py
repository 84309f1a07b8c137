"""Control store on etcd v3, for clusters of several nodes."""

from meshd.control.etcd.etcd_control import EtcdControl

__all__ = ["EtcdControl"]
