"""The one ``torch.library`` namespace of the project. Every op's file defines its schema on it."""

import torch

LIBRARY = torch.library.Library("compiled_llm", "DEF")
