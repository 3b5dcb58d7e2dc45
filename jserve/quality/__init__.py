"""``jserve quality``: how far a model in some form is from its reference, and the gate that bounds it."""
