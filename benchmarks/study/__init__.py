"""What loose acceptance costs, item by item: the parts of benchmarks/fidelity.py."""
