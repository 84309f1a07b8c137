"""What other nodes hold, for services: objects by name, bytes by ETag, documents, frames, listings.

Law: what comes is what was meant, or an error that says why not; a lone node calls nobody. Services see one
mesh: which node is asked, and which next, is decided here. The answering side is `cluster.holdings`.
"""
