"""`omni-server verify`: compares this server's answers with transformers' on the same machine."""
