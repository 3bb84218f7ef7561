"""Benchmarks: named shapes, event timing, results files, the scalar baseline."""
