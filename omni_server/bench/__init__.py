"""`omni-server bench`: a load generator for servers that answer `POST /v1/chat/completions` as a stream.

It is a client and knows a server by its HTTP answers only: nothing of the server is imported here.
"""
