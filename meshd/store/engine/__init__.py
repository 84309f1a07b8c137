"""Storage engine: mutations, group commit, data files, readers and writers.

Law: data before index. Every change of the store is a Mutation that the committer executes.
"""
