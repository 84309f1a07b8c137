"""What makes many nodes one mesh: who is a member, who owns what, what has to be carried where.

Law: decisions are `meshwire.cluster`'s, pure; here they meet the control store, the clock and the network. A
mesh of one node takes none of these ways.
"""
