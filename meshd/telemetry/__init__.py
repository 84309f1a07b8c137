"""Metrics and logs of the daemon.

Law: measures and reports, decides nothing; imports kit, config and errors only. Every metric is defined in
`metrics`, so that names stay consistent; every log line goes through `logs`, so that no secret gets out.
"""
