"""Which worker takes a request: who has which blocks cached, who has how much to do, and the policies. Pure."""
