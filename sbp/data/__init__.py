"""Training data: batches of bytes from a text."""

from sbp.data.text import VOCABULARY, batches, default_text, read_text

__all__ = ["VOCABULARY", "batches", "default_text", "read_text"]
