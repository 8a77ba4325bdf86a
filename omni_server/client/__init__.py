"""Code shared by the HTTP clients `omni-server bench` and `omni-server chat`.

Imports nothing from the server, which is known only by its responses.
"""

DEFAULT_URL = "http://127.0.0.1:8091"
