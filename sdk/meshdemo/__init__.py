"""The demo of `mesh demo`, on one node: store, preprocess, train, resume, share.

Law: uses the project as a newcomer would, through `meshd serve`, plain S3 and `meshsdk`; imports nothing of
meshd. Every claim on the screen is checked by the code that prints it; a false one ends the run with exit
code 1.
"""
