"""Arrays without any framework: boxes, meshes, layouts, dtypes, host memory."""
