"""The engine's arithmetic in plain numpy: an implementation that shares nothing with engine/ but its checkpoint files.

One room an area: numbers (storage formats), layers (what a token goes through), attention, target, drafter (the two
models), sampling, tree. Every function states its shapes; float64 in, float64 out unless said otherwise.
"""
