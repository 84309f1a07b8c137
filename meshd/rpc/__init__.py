"""Communication between processes and nodes: Unix-socket messages with descriptors, signed HTTP to peers.

This package moves bytes and descriptors; it knows no storage, no plans and no HTTP framework. It imports only
telemetry, util, config and errors.
"""
