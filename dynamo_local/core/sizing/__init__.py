"""How large a model is, and what of it fits a machine. Pure: figures in, figures out."""
