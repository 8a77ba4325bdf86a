"""`omni-server check`: whether a checkpoint fits a machine with a stage config, found out without starting
anything."""
