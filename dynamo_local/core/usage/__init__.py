"""What requests have used: counted, written down, folded into totals by the hour, and reported. Pure."""
