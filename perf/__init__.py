"""Benchmarks: named shapes, timing, peers, results files, the scalar baseline."""
