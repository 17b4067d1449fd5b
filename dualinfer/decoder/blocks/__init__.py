"""Layers that are built otherwise from top to bottom, a file each."""
