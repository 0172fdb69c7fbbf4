"""What every part of the driver uses: errors, storage, spans, memory, ranks."""
