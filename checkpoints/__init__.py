"""The weights that ship with jserve and the recipes that made them."""
