"""A checkpoint in another format: `convert(to=)`, by the writers of docs/formats/writing.md."""
