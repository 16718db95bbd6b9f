"""Talk to the other ranks."""
