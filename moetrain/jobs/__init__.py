"""A service that fine-tunes many adapters beside one model that stays loaded.

A *job* is an adapter, its optimizer's state and a sequence of requests of a client
(:mod:`moetrain.jobs.requests`: forward_backward, optim_step, sample, ...). Jobs take turns
(``service``) at one engine and one generator, which are built once (``session``); what was asked
and answered is on the disk (``journal``), and clients come by HTTP (``server``, ``client``).
"""
