"""Plans, batches and gathers: registered, handed out, sent; with the assets and users' ops that plans name.

Law: a batch is a pure function of its address (`meshwire.plans`); nothing here keeps a cursor. Frames are
made by `meshd.assembly`, asked for through here.
"""
