"""The core's view of frameworks: the adapters' protocol and registry, processes, leaves."""
