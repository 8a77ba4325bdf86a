"""`omni-server verify`: compares this server's answers with those of its reference implementation."""
