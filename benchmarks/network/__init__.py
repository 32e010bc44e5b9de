"""Workers on two machines, each a network namespace, with a line between that delays."""
