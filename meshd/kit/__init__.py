"""Small mechanisms any layer may use: the clock, failpoints, tasks, budgets.

Law: no knowledge of storage, HTTP or S3; nothing here imports another package of the daemon except its
settings and errors. Only `kit.clock` reads the machine's time.
"""
