"""State and activations that wait in host memory."""
