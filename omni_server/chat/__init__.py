"""`omni-server chat`: a conversation with a running server, in a terminal."""
