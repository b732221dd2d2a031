"""Performance regression gate: interleaved benchmarks of two revisions, compared by a sequential test."""
