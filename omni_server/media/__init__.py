"""Reads media items from their sources and decodes them to the arrays that requests carry.

`decode_audio`, `count_samples`, `decode_image` and `decode_video` block for up to seconds: call them in a
thread. Each raises `InvalidRequestError`, without `param`, for bytes that it cannot use; the message never
contains a path, a traceback or text of a decoding library.
"""
