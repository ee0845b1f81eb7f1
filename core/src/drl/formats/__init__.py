"""Adapter files of every tool: what they are, reading, writing, comparing (lora.md 3).

``headers``, ``layout``, ``names``, ``detect`` and ``describe`` need no torch: they look at headers and
JSON alone. Everything else works on ``adapter.Adapter``, the one form that every format is read into and
written from.
"""
