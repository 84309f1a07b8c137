"""Side-by-side measurements: the daemon and the SDK beside the servers and loaders a user would pick instead.

Law: the same generator, the same connections, the same bytes and the same two cores for every contender, in
one run, in turns (`bench.interleave`). A contender that answers with an error has no figure. A row in which
a peer is better is shown too. How a contender or a row is added: README.md beside this file.
"""
