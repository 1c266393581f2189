"""The commands: one module for each ``python -m moetrain.NAME``, and what they share."""
