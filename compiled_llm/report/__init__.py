"""What a run did, and what share of the machine's limits it reached."""
