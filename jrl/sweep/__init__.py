"""Many runs from one config: every combination of some keys' values, several seeds each, compared at the end.

`python -m jrl.sweep --help` says how; `grid` is what a sweep consists of, `execute` runs it (`on_ray` elsewhere), `results` reads
what the runs have left, `page` and `figure` show it.
"""
