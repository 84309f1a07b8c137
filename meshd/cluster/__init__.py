"""Membership, replication, rebalancing and repair: what makes many nodes one cluster.

Law: decisions are pure and belong to `meshwire.cluster`; this package connects them to the control
store, the clock and the network. A single-node installation uses none of it.
"""
