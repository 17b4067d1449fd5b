"""Checkpoints written."""
