"""Communication between processes and nodes: Unix-socket messages with descriptors, signed HTTP to peers.

Law: moves bytes and descriptors; knows no storage, no plans and no HTTP framework. Imports telemetry,
util, config and errors only.
"""
