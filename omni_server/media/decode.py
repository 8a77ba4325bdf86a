"""Bytes of media items to the arrays that requests carry. Blocking work of up to seconds: call it in a thread.

Every function raises `InvalidRequestError`, without `param`, for whatever the bytes are that it cannot use; the
message never holds a path, a traceback or the words of a decoding library.
"""

from omni_server.media.audio import count_samples, decode_audio
from omni_server.media.image import decode_image
from omni_server.media.video import decode_video

__all__ = ["count_samples", "decode_audio", "decode_image", "decode_video"]
