"""Many requests at once: who is let in when, and the server."""
