"""Transports: how shards and gradients travel among the ranks of a group. One file each."""
