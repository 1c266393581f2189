"""Kernels: the few places where an MoE trainer's time goes, each one file, usable on its own.

Every file opens with its maths and shape legend. What training calls runs in plain torch, too, and
raises a ValueError that says what it was given and what it takes.
"""
