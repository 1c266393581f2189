"""Formulas of losses: balancing, policies, preferences, advantages."""
