"""Attention: one entry point (:func:`attention.attention`) over several backends."""
