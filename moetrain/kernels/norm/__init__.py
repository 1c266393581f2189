"""RMS norm and rotary positions, each fused into one pass over its input."""
