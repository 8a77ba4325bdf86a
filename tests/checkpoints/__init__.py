"""Small checkpoints in the layout of published models, with random weights or none, for tests and
measurements.

scripts/make_demo_checkpoint is the program. Importing the package imports neither torch nor
transformers; `tests.checkpoints.write` does.
"""
