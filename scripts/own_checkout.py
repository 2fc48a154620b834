"""Lets a program find the package in its own checkout: it imports this before all else that may import the package.

So only the packages that the project needs have to be installed, and an installed version of it is not used instead.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

sys.path.insert(1, str(ROOT))  # behind the program's own directory
