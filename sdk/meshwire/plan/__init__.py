"""Plans: shuffle, mix, packing and slices of an epoch, keyed random numbers, loader state, user ops.

Law: pure functions of (snapshot, plan, epoch, step, rank); every constant is pinned by golden vectors.
"""
