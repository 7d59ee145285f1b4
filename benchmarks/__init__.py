"""What this package costs and gains, measured: `python -m benchmarks --help`."""
