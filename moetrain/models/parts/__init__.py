"""Parts of layers that only some families use."""
