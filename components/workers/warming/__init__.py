"""What a worker brings into its cache before it is asked for it."""
