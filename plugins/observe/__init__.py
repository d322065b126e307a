"""Rules derived from a converter: run it on arrays of known elements, trace each element, and write
the result in the notation of docs/rules.md.

Others record the operations of a converter on fake tensors, which fails on arithmetic, `.item()`
and masks. The numbers in the elements do not care which operations moved them.
"""
