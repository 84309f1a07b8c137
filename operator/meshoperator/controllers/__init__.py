"""Controllers: reconcile loops that observe, ask a planner, act, and write status.

Law: each pass starts from the current state and may be repeated; the next pass does what this one
leaves undone.
"""
