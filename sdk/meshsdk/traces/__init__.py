"""Traces of a loader's steps: Chrome's trace format and NVTX ranges.

Law: observers of a loop (`meshsdk.meters`); they record only what was measured anyway.
"""
