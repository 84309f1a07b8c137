"""Rules and dashboards as code: what Prometheus derives, what wakes somebody, what people look at.

Law: pure. The files under `helm/shardmesh/` are made of it by `make reference`; a test compares them, and
others run every expression in a real Prometheus that scrapes real daemons.
"""
