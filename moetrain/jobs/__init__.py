"""A service that fine-tunes many adapters beside one model that stays loaded.

A *job* is an adapter, its optimizer's state and a sequence of requests from a client (``api``:
forward_backward, optim_step, sample, ...). Jobs take turns (``scheduler``) at one engine and one
generator, which are built once (``session``); requests and answers are on the disk (``store``), and
clients come by HTTP (``server``, ``client``).
"""
