"""A service that fine-tunes many adapters beside one model that stays loaded.

A *job* is a training run (an adapter with its optimizer's state) or a sampler of saved weights. It
has a sequence of requests from a client (``api``). Jobs take turns (``scheduler``) at one engine
and one generator, which are built once (``session``). Requests and answers are on the disk
(``store``), and clients use the ``tinker`` SDK (``server``).
"""
