"""What models of the Qwen family have in common behind their talker: how codec tokens become frames, and
frames audio."""
