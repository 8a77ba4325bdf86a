"""The command `omni-server`."""
