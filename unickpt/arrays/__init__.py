"""What an array is, without any framework: boxes, meshes, layouts, dtypes, host memory."""
