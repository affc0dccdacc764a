"""`python -m pyfly_cpp` is `pyfly-cpp`."""

from pyfly_cpp.cli import main

if __name__ == "__main__":
    main()
