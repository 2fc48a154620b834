"""This engine and others on the same requests. The others run in environments of their own: docs/peers.md."""
