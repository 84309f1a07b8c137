"""Cluster administration: pure summaries of what nodes report about rebalancing and scrubbing."""
