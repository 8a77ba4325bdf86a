"""Load that knows the right answer to every request: shared by tests/faults and scripts/soak."""
