"""This machine: its devices, threads and memory, kernels for its processor, and its files."""
