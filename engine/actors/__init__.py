"""Ray actors: thin shells around plain classes, their placement and supervision.

The only place in `engine/` that imports ray.
"""
