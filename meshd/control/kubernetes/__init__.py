"""Control store on the Kubernetes API, for clusters without an etcd of their own.

Each key is one resource: a ConfigMap, or a Secret where the topic may contain secrets. Versions are
resource versions.
"""
