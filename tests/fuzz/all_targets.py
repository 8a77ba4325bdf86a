"""Every fuzzer by its name. Those of media containers, base64 and `data:` URLs are in
tests/unit/media/test_fuzz.py."""

from tests.fuzz.child_output import CHILD_OUTPUT
from tests.fuzz.http_bodies import CHAT_BODIES, FORMS, IMAGE_BODIES, SPEECH_BODIES
from tests.fuzz.raw_sockets import HTTP_BYTES, WEBSOCKET_BYTES
from tests.fuzz.realtime_events import REALTIME_EVENTS
from tests.fuzz.stage_configs import STAGE_CONFIGS

TARGETS = {
    target.name: target
    for target in (
        CHAT_BODIES,
        SPEECH_BODIES,
        IMAGE_BODIES,
        FORMS,
        HTTP_BYTES,
        WEBSOCKET_BYTES,
        REALTIME_EVENTS,
        STAGE_CONFIGS,
        CHILD_OUTPUT,
    )
}
