"""Oddities: each file holds all that one rare build of a layer, or recurrence, needs."""
