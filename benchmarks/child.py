"""A process that answers lines of JSON: what a benchmark measures in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

from typing_extensions import Self


class Child:
    """`python SCRIPT WORDS...`, which answers each line with one; the first answer tells that it is ready."""

    def __init__(self, script: str, words: list[str], options: dict[str, Any]) -> None:
        self._words = words
        self._process = subprocess.Popen(
            [sys.executable, script, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ready = self.ask(options)
        """Its answer to its options."""

    def ask(self, what: dict[str, Any]) -> Any:
        """Its answer. Raises SystemExit if it has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(what), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise SystemExit(f"the process of {' '.join(self._words)!r} {self._how_it_ended()}")
        return json.loads(line)

    def _how_it_ended(self) -> str:
        """With a signal, it had no time for an error of its own: llama.cpp's AMX crashes in some builds."""
        code = self._process.wait()
        if code < 0:
            name = signal.Signals(-code).name
            return f"crashed ({name}); on an Intel Xeon docs/troubleshooting.md has the cause and the remedy."
        return "has ended; its error stands above."

    def close(self) -> None:
        """Waits until it has ended."""
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
