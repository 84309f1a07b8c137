"""`mesh cache simulate`: replays traces of reads on the daemon's eviction policy and on others.

Law: pure and deterministic. The simulated policy is the daemon's own code (`meshd.origins.eviction`). To
compare another policy, write one class and one entry of `simulator.POLICIES`.
"""
