"""Comparing variants of the methods: each trained on the same data for as many blocks, then measured."""
