"""Protection of the training state against the loss of memory: parity, checksums."""
