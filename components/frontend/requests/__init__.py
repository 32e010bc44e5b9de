"""The live requests of a frontend: what it knows of each, and how each goes on when tokens or its worker are lost."""
