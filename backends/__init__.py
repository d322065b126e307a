"""Storage schemes and the formats of other systems; registries import them by name."""
