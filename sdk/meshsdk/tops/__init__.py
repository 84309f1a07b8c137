"""What runs on this machine and on the nodes behind it, on one screen: `mesh top`.

Law: looks, and changes nothing. What cannot be asked is told as missing, with the reason; rates are
differences between two looks. Text of other processes is bounded and made harmless before it is shown.
"""
