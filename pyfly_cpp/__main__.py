"""`pyfly-cpp`, and `python -m pyfly_cpp`: the command line, which needs packages that the library does not."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line and exits."""
    try:
        from pyfly_cpp.cli import main as run

        run()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("click", "rich", "prompt_toolkit"):
            raise
        sys.exit(f"Error: the command line needs {error.name}; run `pip install 'pyfly-cpp[cli]'`.")


if __name__ == "__main__":
    main()
