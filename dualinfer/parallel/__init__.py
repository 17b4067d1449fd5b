"""Many devices: the plan that shares a model out, and what processes say to each other."""
