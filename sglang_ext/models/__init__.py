"""Targets and drafters as torch modules and files; imports no serving code."""
