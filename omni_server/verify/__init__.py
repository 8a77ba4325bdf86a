"""`omni-server verify`: this server's answers beside those of transformers, on the same machine."""
