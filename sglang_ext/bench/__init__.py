"""Measurements of a running server: speed, acceptance, text equality, step times, memory.

Everything here reaches the server over HTTP; nothing imports SGLang. See ``docs/benchmarks.md``.
"""
