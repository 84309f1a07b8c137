"""Planners: pure decisions of the operator, from observed state to actions, manifests and status.

Law: no clock, no I/O, no Kubernetes client; the same input has the same answer. `controllers` executes
it.
"""
