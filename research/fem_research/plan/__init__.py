"""What a training costs before anybody pays for it: memory, messages and time of a GPU, counted and predicted."""
