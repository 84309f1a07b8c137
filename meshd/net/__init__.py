"""Talking to other processes: Unix-socket messages with file descriptors; later, HTTP to peers.

Law: moves bytes and descriptors, knows no storage and no plans; imports telemetry, kit, config, errors only.
"""
