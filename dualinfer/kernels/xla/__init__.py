"""How JAX launches the kernels of kernels/triton: several of them in one custom call of XLA.

`call` runs a function of that package on JAX arrays, `grouping` makes one call of launches that
follow one another, and `handler` is what XLA calls.
"""
