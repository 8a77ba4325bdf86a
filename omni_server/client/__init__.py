"""What programs that talk to a server over HTTP share: `omni-server bench` and `omni-server chat`.

Nothing of the server is imported here: it is known by its answers only.
"""

DEFAULT_URL = "http://127.0.0.1:8091"
