"""How accurate the package is, and how that is judged: tests and `kda-cute certify` share it.

`regimes` (inputs), `calls` (calls of chunk_kda and their float64 oracles), `errors` (norms),
`tolerances` (of level 2), `recurrence` (the gate of level 1), `measure` (one case: errors by
tensor), `certificate` (all cases, tables and files), `peers` (who else can be measured).
"""
