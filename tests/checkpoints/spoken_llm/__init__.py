"""Language models and a Qwen3-TTS checkpoint that reads their answers aloud."""
