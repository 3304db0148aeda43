"""An HTTP server over a local engine: token ids in and out, and OpenAI's chat and completion forms."""
