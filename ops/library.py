"""The project's one ``torch.library`` namespace. The file of each op defines its schema there."""

import torch

LIBRARY = torch.library.Library("compiled_llm", "DEF")
