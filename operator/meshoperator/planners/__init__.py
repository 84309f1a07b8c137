"""Planners: pure decisions of the operator, from observed state to actions, manifests and status.

Law: no clock, no I/O, no Kubernetes client; the same input gives the same result. `controllers` carries
it out.
"""
