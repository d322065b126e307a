"""ByteCheckpoint's folders."""
