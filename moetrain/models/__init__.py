"""Models: single-device mathematics that never asks how it is spread over devices."""
