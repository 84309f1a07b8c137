"""A loader's steps for tools that show time: Chrome's trace format, NVTX ranges.

Law: observers of a loop (`meshsdk.observing`); they record what was measured anyway.
"""
