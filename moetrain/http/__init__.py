"""HTTP for the servers of ``serve``, ``rl`` and ``jobs``.

:mod:`~moetrain.http.json_server` is JSON over HTTP with bounded bodies and connections,
:mod:`~moetrain.http.access` decides which clients are served, :mod:`~moetrain.http.protocol` is
OpenAI's protocol, and :mod:`~moetrain.http.answers` sends its replies, whole or as streams.
"""
