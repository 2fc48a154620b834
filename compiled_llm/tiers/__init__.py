"""tiers: files of KV blocks, blocks of other engines, and the thread that moves them. No torch."""
