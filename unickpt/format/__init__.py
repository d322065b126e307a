"""The stored format: index, chunk grids, digests, Zarr metadata, chunks; protocols of readers."""
