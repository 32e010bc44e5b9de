"""What a server starts, decided before it starts anything: the plan of its processes, and whether machine and addresses
have room for it."""
