"""The bits of a token mask: one a token, in words of 32. The host writes them, the graph applies them. No torch."""

BITS = 32


def num_mask_words(vocab_size: int) -> int:
    """Words of 32 bits that have a bit for each token."""
    return -(-vocab_size // BITS)
