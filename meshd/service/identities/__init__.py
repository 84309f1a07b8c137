"""Users, keys, named policies and temporary credentials, as administrators and users change them.

Law: what is changed here stands in the control store, and every node judges by it. What cannot be done is
said in words that an administrator can act on (`errors`).
"""
