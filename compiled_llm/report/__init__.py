"""What a run did, and how near the machine's limits it came."""
