"""Optimizers for sharded weights, QK-clip, and learning-rate schedules."""
