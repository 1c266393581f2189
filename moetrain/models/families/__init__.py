"""The model families, one file each; every file here has a ``FAMILY``."""
