"""The stored format: index, chunk grids, digests, Zarr metadata, chunks; readers of any format."""
