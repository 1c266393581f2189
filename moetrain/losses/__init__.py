"""Formulas of losses: router balancing, policies, preferences, advantages."""
