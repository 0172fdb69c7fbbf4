"""Shared code of the driver: errors, storage, spans, memory, ranks."""
