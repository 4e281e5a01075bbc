"""The training state: segments, header, capture, the chunk transaction."""
