"""Storages: where the elements of a bucket's shard lie, and in which form. One file each."""
