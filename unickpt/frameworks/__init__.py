"""What the core knows of frameworks: the adapters' protocol and registry, processes, leaves."""
