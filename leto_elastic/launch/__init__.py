"""Inside torchrun: the seam, the agent, processes, segments, logs."""
