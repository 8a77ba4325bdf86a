"""`omni-server verify`: compares this server's answers with its reference implementation's on the same machine."""
