"""Optimizers on sharded weights, and what they need."""
