"""Patches that change how much of a core an engine costs, and no result. `cpu-tuning: false` leaves them out."""
