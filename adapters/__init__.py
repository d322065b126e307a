"""Frameworks' arrays and meshes -> layouts, fragments and host memory, and back."""
