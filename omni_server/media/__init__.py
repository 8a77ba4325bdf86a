"""Bytes of media items, and where they come from, to the arrays that requests carry.

`decode_audio`, `count_samples`, `decode_image` and `decode_video` do blocking work of up to seconds: call
them in a thread. Each raises `InvalidRequestError`, without `param`, for whatever bytes it cannot use; the
message never holds a path, a traceback or the words of a decoding library.
"""
