"""Where bytes live: locations, local files, OCDBT databases, and the errors of the storage."""
