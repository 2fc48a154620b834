"""Serve files of rows and write the results; the same as ``compiled-llm batch``.

    python scripts/serve_offline.py --bucket-sizes 1,8,32
    python scripts/serve_offline.py --model DIR --input rows.jsonl --output out.jsonl --resume

See ``compiled_llm/commands/batch.py`` and docs/offline.md.
"""

import sys

import own_checkout

from compiled_llm.commands.batch import main

if __name__ == "__main__":
    sys.exit(main("serve_offline"))
