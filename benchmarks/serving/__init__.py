"""A load generator for servers that answer `POST /v1/chat/completions`, `POST /v1/audio/speech` or
`POST /v1/images/generations` as a stream. `scripts/bench_serving` runs it. It knows a server only by its HTTP
responses.
"""
