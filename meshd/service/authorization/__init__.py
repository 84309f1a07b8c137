"""Who may do what: the needs of a request, the facts that conditions ask for, policies, ownership, ACLs.

Law: judges, and stores nothing. In which order policies, ownership and ACLs are asked is said in one place
(`judging`); what policies mean is `meshwire.policies`.
"""
