"""Processes that load together share what they read: `LoadOptions(exchange=)`."""

from unickpt.plugins.exchange.collective_read import in_job
from unickpt.plugins.exchange.node_read import on_node

__all__ = ["in_job", "on_node"]
