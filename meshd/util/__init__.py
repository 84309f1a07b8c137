"""Small mechanisms that any layer may use: clock, failpoints, background tasks, limits, shared counters.

Law: no knowledge of storage, HTTP or S3; imports only settings and errors from the daemon. Only
`util.clock` reads the system clock.
"""
