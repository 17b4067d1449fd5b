"""The engine of a server in a process of its own."""
