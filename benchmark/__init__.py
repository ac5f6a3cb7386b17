"""Measuring tools: workloads, the serving client, the brain alone. Run from the repository root, `python -m benchmark.bench_serving`."""
