"""Controllers: reconcile loops that observe, ask a planner, act, and write status.

Law: each pass starts from the current state and may be repeated; whatever a pass leaves undone, the next
one does.
"""
