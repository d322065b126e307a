"""Shared parts of commands, including those of plug-ins: output, options, tables."""
