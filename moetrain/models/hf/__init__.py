"""Hugging Face checkpoints: read, checked, loaded and written."""
