"""Checkpoints in each node's own memory or disk: `Checkpointer(root, node_local=...)`.

A step is one checkpoint whose data files lie in the folders of the nodes. The small files that all
processes must see (records, index, manifest) lie in `.nodes` in the root. So a step is committed,
merged and checked like any other; a copy of it in the root is the same files in one place.

Saving to the memory of each node and uploading from all nodes are ideas of MegaScale
(arXiv 2402.15627) and Gemini (SOSP 2023).
"""

from unickpt.plugins.nodes.tier import join

__all__ = ["join"]
