"""RMS norm, rotary positions, and elementwise functions, as ops."""
