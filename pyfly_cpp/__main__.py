"""`pyfly-cpp`, and `python -m pyfly_cpp`: the command line, which needs packages that the library does not."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line and exits."""
    try:
        from pyfly_cpp.cli import main as run

        run()
    except KeyboardInterrupt:  # during the imports
        sys.exit(130)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in ("click", "rich", "prompt_toolkit"):
            raise
        sys.exit(f"Error: the command line needs {name}; run `pip install 'pyfly-cpp[cli]'`.")


if __name__ == "__main__":
    main()
