"""The Kubernetes operator: its settings and its planner, so far.

Law: decides purely (`planning`), acts elsewhere; imports meshwire and meshd.config, nothing else of ours.
Must not shadow the standard library's `operator`: the folder that holds this package is no package.
"""
