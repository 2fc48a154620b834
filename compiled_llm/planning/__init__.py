"""Which models go on which devices: requests simulated over step costs. Torch is for ``model_facts.py`` alone."""
