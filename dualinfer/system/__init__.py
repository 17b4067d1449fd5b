"""The machine: memory, progress on the terminal, folders of the user's own."""
