"""Kernels' configurations: what a model needs, the search, and the results that are kept."""
