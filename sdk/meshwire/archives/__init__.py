"""Archives as formats: which objects are one, where their members lie, and the index that keeps it.

Law: pure, like all of `meshwire`: bytes come through a function that is given, inflating is the daemon's.
Whatever an archive says of itself is checked against its size before it is believed.
"""
