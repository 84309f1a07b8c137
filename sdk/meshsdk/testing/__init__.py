"""What ships for tests of loaders: their laws as a suite.

Law: the public SDK and pytest's conventions alone; imported by nothing of `meshsdk`.
"""
