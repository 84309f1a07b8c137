"""Plans, batches and gathers, with the assets and user modules that plans name.

Law: a batch is a pure function of its address (`meshwire.plan`); nothing here keeps a cursor. `assembly`
builds the frames.
"""
