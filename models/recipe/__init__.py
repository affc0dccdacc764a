"""The recipe of the tiny model family: trains it, exports it as GGUF, and checks the export. See README.md."""
