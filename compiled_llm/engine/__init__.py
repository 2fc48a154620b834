"""What a user calls, and the loop below it."""
