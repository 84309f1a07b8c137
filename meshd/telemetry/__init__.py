"""Metrics, logs and the audit log of the daemon.

It measures and reports, and decides nothing; it imports only util, config and errors. Every metric is defined
in `metrics`, so that names stay consistent; every log line goes through `logs`, so that no secret is written.
"""
