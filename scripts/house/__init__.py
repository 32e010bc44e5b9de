"""How large the product's code is, how it is cut, and how much of it one action enters. Nothing of it is imported."""
