"""Many requests at once: who is let in when, and, in `http`, the server."""
