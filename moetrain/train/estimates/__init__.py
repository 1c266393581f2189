"""Estimates of the memory and time that a run takes, before anything is built."""
