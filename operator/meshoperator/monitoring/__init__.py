"""Monitoring as code: recording rules, alerts and dashboards.

Law: pure. `make reference` writes the files under `helm/shardmesh/` from it; a test compares them, and
others run every expression in a real Prometheus that scrapes real daemons.
"""
