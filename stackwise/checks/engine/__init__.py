"""Engine: ask a model in many equivalent ways, and compare each result with the plain answer.

A model computes one function of a sequence. A `Variation` is a way to ask for the same function: with
padding, through the cache, after another call. A composition is a set of variations. The engine draws
compositions, executes them, shrinks each difference to the fewest variations, and locates the first module
that differs.
"""
