"""Device programs: pure JAX functions. Nothing here keeps state, reads the environment or knows a
scheduler.

Array names end in their shape, one letter an axis::

    T tokens in the step    R rows in the step     C slots            P pages in the pool
    Z tokens per page       M pages per row        J drafts + 1       L layers
    D model                 F ffn                  N query heads      K kv heads
    G = N / K               H head                 S context          V vocabulary
    W = ceil(V / 32)        E experts              X experts per token
"""
