"""A process that runs code of one checkout and answers in turns with that of another one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Side:
    """Runs ``program``, which prints a line of JSON when it is ready, and one for each question that it reads."""

    def __init__(self, checkout: Path, program: str, *arguments: str) -> None:
        env = {**os.environ, "PYTHONPATH": str(checkout)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            cwd=checkout,
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._answer()

    def tell(self, question: Any) -> None:
        """Ask, and wait for no answer."""
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)

    def ask(self, question: Any) -> Any:
        self.tell(question)
        return self._answer()

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process ended with exit status {self._process.wait()}; see above")
        return json.loads(line)
