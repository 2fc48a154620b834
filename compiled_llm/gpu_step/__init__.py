"""A GPU's step, seen on any machine: its launches, what their code is like, and how long they should take."""
