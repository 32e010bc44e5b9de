"""Migrations as the frontend of a request schedules and executes them."""
