"""The bytes of an OCDBT database, decoded and encoded; TensorStore documents the format."""
