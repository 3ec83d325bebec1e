"""specgate: an OpenAI-compatible gateway that chooses how each request is decoded, and says why."""

__version__ = "0.1.0"
