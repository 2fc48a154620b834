"""Which of several engines gets a request: by the prefix that it holds, then by load. Plain Python."""
