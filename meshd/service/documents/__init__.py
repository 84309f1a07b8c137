"""Documents that nodes share (plans, snapshots, assets, indexes): counted, shown, collected when unused.

Law: what anybody may still use is kept; what goes is decided purely (`retention`) from when it was last used
and what refers to it. How documents are read from other nodes is `remote`'s.
"""
