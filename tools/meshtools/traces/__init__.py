"""Traces of a loader's steps: Chrome's trace format and NVTX ranges.

Law: traces are observers of a loop (`meshsdk.loader_stats`); they record what the loader measures anyway, and
measure nothing themselves.
"""
