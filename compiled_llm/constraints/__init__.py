"""Which tokens may follow: grammars and masks."""
