"""Quantisation to 8 and 4 bits, and products of quantised operands."""
