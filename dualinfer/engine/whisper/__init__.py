"""Whisper's own generate, beside that of all models: language and task, timestamps, windows."""

from .calls import SpeechCalls

__all__ = ["SpeechCalls"]
