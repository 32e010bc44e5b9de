"""Changes to what runs: adding, removing, restarting workers, and finishing what broke off."""
