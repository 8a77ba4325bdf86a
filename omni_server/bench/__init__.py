"""`omni-server bench`: a load generator for servers that answer `POST /v1/chat/completions` or
`POST /v1/images/generations` as a stream.

It is a client and knows a server only by its HTTP responses: it imports nothing from the server.
"""
