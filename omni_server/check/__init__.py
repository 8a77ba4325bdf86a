"""`omni-server check`: whether a checkpoint, a stage config and a machine go together, without starting
anything."""
