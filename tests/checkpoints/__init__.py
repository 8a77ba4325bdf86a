"""Small checkpoints in the layout of published models, with random weights or none, for tests and
measurements, and for `omni-server serve --demo`.

`python -m tests.checkpoints --help` is the program. Importing the package imports neither torch nor
transformers; `tests.checkpoints.write` does.
"""
