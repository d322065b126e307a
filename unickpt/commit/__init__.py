"""From what the processes wrote to one checkpoint that appears atomically."""
