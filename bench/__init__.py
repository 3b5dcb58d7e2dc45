"""Benchmarks of jserve and its peers; run as modules from the repository root (bench/README.md)."""
