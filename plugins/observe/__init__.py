"""Rules written from what a converter does: run it on arrays of known elements, see where each of
them went, and say it in the notation of docs/rules.md.

Others record the operations of a converter on fake tensors, which fails on arithmetic, `.item()`
and masks. The numbers in the elements do not care which operations moved them.
"""
