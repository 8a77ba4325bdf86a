"""Load that knows the right answer to every request: shared by tests/faults, scripts/soak and
scripts/overload."""
