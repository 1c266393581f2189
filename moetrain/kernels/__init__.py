"""Kernels: the few places where an MoE trainer's time goes, each one file, usable on its own.

Every file opens with its maths and shape legend and holds a plain-torch reference.
"""
