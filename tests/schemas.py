"""JSON schemas of the kinds that people ask for, to test structured output with: pairs of name and schema."""

import json
from pathlib import Path
from typing import Any

SCHEMAS: list[tuple[str, dict[str, Any]]] = [*json.loads(Path(__file__).with_suffix(".json").read_text()).items()]
