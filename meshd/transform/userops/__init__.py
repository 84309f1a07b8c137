"""Ops that users push: their modules, the processes they run in, and what these may do.

Law: a user's code never runs in a process of the daemon's. It runs in one that was started anew for one build
of one module, holds nothing of the daemon's, and is confined before the first line of the module runs; what
it says is read as a stranger's. Killing it costs a retry of one sample.
"""
