"""Methods that draft tokens on the host, for steps to verify. Never torch."""
