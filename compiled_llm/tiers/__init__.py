"""tiers: files of KV blocks, and the thread that reads and writes them. No torch."""
