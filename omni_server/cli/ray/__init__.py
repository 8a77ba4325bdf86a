"""The command `omni-server ray`, and what it runs on the machines of a Ray cluster."""
