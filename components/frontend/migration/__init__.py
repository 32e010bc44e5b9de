"""Migrations of a frontend's requests: which are begun, how one is carried out, and what is counted."""
