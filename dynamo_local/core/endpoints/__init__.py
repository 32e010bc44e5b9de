"""Endpoints: models that a server serves beside each other. What is ordered, what follows from it, what is shown."""
