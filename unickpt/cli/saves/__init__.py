"""What is shown of saves: how long they took, and how far they are."""
