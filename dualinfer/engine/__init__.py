"""Engines: what a call returns, in its two modes."""
