"""A model that several processes run together: they are started, told each step, and watched."""
