"""Kernels: the operations in which an MoE trainer spends its time, each beside a plain reference.

Every module opens with its maths and shape legend. A function that training calls also runs in
plain torch, and raises a ValueError that says what it was given and what it takes.
"""
