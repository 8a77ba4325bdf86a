"""`omni-server check`: determines whether a checkpoint fits a machine with a stage config, without starting
it."""
