"""The Kubernetes operator: its resources, its planner, its loops.

Law: decides purely (`resources`, `planning`), acts elsewhere; of ours it imports meshwire, nothing else.
Must not shadow the standard library's `operator`: the folder that holds this package is no package.
"""
