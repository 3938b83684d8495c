"""What a machine's processor and memory, or its GPU, allow, and how near the ops come to it."""
