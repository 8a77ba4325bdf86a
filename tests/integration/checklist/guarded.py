"""Flags of a server that rows of the checklist ask for."""

KEY, OTHER_KEY = "sk-checklist-first", "sk-checklist-second"
SITE = "https://chat.example"
MAX_BODY_BYTES = 1_000_000
MAX_QUEUE = 2

FLAGS = (
    *("--api-key", KEY, OTHER_KEY),
    *("--allowed-origins", SITE),
    *("--max-body-size", str(MAX_BODY_BYTES)),
    *("--max-queue", str(MAX_QUEUE)),
)
