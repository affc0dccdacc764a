"""The lines of a server on stderr. Nothing of prompts and answers, unless it is asked for."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from typing import Any


class Log:
    """Lines for whoever runs the server. One that cannot be written (a full disk, a closed pipe) is lost."""

    def __init__(self, what: str) -> None:
        """`what`: as of `Settings.log`."""
        self.wants_requests = what != "none"
        self.wants_texts = what == "texts"

    def request(self, **fields: Any) -> None:
        """One that was answered."""
        if self.wants_requests:
            self._write(json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S"), **fields}, ensure_ascii=False))

    def failure(self, failure: BaseException) -> None:
        """One that should not be. Its words may quote a prompt, so they need PYFLY_DEBUG=1."""
        place = traceback.extract_tb(failure.__traceback__)[-1:]
        where = f" at {os.path.basename(place[0].filename)}:{place[0].lineno}" if place else ""
        self._write(f"a request failed: {type(failure).__name__}{where}; PYFLY_DEBUG=1 shows more.")
        if os.environ.get("PYFLY_DEBUG"):
            self._write("".join(traceback.format_exception(type(failure), failure, failure.__traceback__)))

    def warn(self, text: str) -> None:
        """A fault that whoever runs the server can mend; has nothing of a request."""
        self._write(text)

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
