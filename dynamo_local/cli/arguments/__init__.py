"""Options that several commands share, types of their values, and values that the shell completes."""
